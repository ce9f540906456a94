"""Tests how an exception of a rank is classified, with exceptions that torch and the system raise themselves."""

import datetime
import errno
import os
import socket
import unittest

import torch.distributed as dist

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Cause, cause_in, cause_of

# Messages that need NCCL, gloo's pairs or a moment that cannot be chosen; real ones are in the other tests.
OF_TORCH = {
    "[../gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:12345": Cause.LOST_PEER,
    "Read error [127.0.0.1]:23: Connection reset by peer": Cause.LOST_PEER,
    "NCCL error: remote process exited or there was a network error": Cause.LOST_PEER,
    "NCCL communicator was aborted on rank 1": Cause.LOST_PEER,
    "failed to recv, got 0 bytes": Cause.LOST_PEER,
    "recvValue failed on SocketImpl(fd=5)": Cause.LOST_PEER,
    "Timed out waiting 1000ms for recv operation to complete": Cause.TIMED_OUT,
    "The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE": Cause.PORT_IN_USE,
    "shapes do not match": Cause.OWN,
    "NCCL is not available": Cause.OWN,
    "": Cause.OWN,
}


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


class TestCauses(unittest.TestCase):
    def test_messages_of_torch(self):
        for message, cause in OF_TORCH.items():
            with self.subTest(message):
                for kind in (RuntimeError, dist.DistBackendError, dist.DistNetworkError):
                    self.assertIs(cause_of(kind(f"{message}\nmore lines")), cause)
                self.assertIs(cause_in(f"RuntimeError: {message}"), cause)

    def test_only_the_first_line_counts(self):
        self.assertIs(cause_of(RuntimeError("mine\nConnection closed by peer")), Cause.OWN)

    def test_errors_of_the_system_by_their_number(self):
        table = {errno.ECONNRESET: Cause.LOST_PEER, errno.EPIPE: Cause.LOST_PEER, errno.ENOENT: Cause.OWN}
        for number, cause in table.items():
            self.assertIs(cause_of(OSError(number, "Connection closed by peer")), cause)

    def test_a_refused_connection(self):
        with socket.socket() as bound, socket.socket() as other:
            bound.bind(("127.0.0.1", 0))  # it does not listen
            self.assertIs(cause_of(raised_by(lambda: other.connect(bound.getsockname()))), Cause.LOST_PEER)

    def test_a_port_in_use(self):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            first.listen()
            port = first.getsockname()[1]
            errors = [raised_by(lambda: second.bind(("127.0.0.1", port)))]
            errors += [raised_by(lambda: dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))]
        for error in errors:
            self.assertIs(cause_of(error), Cause.PORT_IN_USE)

            def wrapped(error=error):
                raise ValueError("no server") from error

            self.assertIs(cause_of(raised_by(wrapped)), Cause.PORT_IN_USE)

    def test_a_broken_pipe(self):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            self.assertIs(cause_of(raised_by(lambda: os.write(writing, b"x"))), Cause.LOST_PEER)
        finally:
            os.close(writing)

    def test_a_store_that_waits_in_vain(self):
        store = dist.HashStore()
        store.set_timeout(datetime.timedelta(milliseconds=1))
        self.assertIs(cause_of(raised_by(lambda: store.get("absent"))), Cause.TIMED_OUT)

    def test_other_types_may_say_anything(self):
        for kind in (ValueError, AssertionError, KeyError):
            self.assertIs(cause_of(kind("Connection closed by peer")), Cause.OWN)

    def test_an_exception_that_says_it_itself(self):
        class Alone(Exception):
            cause_of_failure = Cause.LOST_PEER

        self.assertIs(cause_of(Alone()), Cause.LOST_PEER)

    def test_an_exception_without_a_text(self):
        class Broken(RuntimeError):
            def __str__(self):
                raise ValueError

        self.assertIs(cause_of(Broken()), Cause.OWN)


if __name__ == "__main__":
    run_tests()
