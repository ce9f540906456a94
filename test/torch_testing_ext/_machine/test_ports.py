"""Free ports and retries of failed connections."""

import random
import socket
import time
from unittest import mock

import torch.distributed as dist

from torch_testing_ext import common_utils
from torch_testing_ext._machine import ports
from torch_testing_ext.common_utils import (
    TestCase,
    find_free_port,
    retry_on_connect_failures,
    run_tests,
)


class TestPorts(TestCase):
    def test_a_leased_port_is_for_one_server(self):
        """A server of torch can listen on it, with either backend, and another process is not given it."""
        with ports.leased_port() as port:
            for use_libuv in (True, False):
                store = dist.TCPStore("127.0.0.1", port, 1, True, use_libuv=use_libuv)
                store.set("key", "value")
                del store
            with ports.leased_port() as other:
                self.assertNotEqual(port, other)
            with socket.socket() as stranger, self.assertRaises(OSError):
                stranger.bind(("", port))

    def test_the_port_can_be_bound(self):
        with socket.socket() as server:
            server.bind(("localhost", find_free_port()))

    def failing(self, times, error):
        left = [error] * times
        calls = []

        def connect(value):
            calls.append(value)
            if left:
                raise left.pop()
            return value

        return connect, calls

    def retried(self, function, *args, **options):
        with mock.patch.object(time, "sleep") as sleep:
            decorated = (
                retry_on_connect_failures(**options)(function) if options else retry_on_connect_failures(function)
            )
            try:
                return decorated(*args)
            finally:
                self.waits = sleep.call_count

    def test_retries(self):
        connect, calls = self.failing(3, RuntimeError("[Errno 98] Address already in use"))
        self.assertEqual(self.retried(connect, 5), 5)
        self.assertEqual([len(calls), self.waits], [4, 3])

    def test_gives_up_after_ten_runs(self):
        connect, calls = self.failing(99, RuntimeError("Address already in use"))
        with self.assertRaisesRegex(RuntimeError, "Failing after 10 retries with error: Address already in use"):
            self.retried(connect, 5)
        self.assertEqual([len(calls), self.waits], [10, 9])

    def test_other_errors_are_not_retried(self):
        for error in (RuntimeError("something else"), ValueError("Address already in use")):
            connect, calls = self.failing(1, error)
            with self.assertRaises(type(error)):
                self.retried(connect, 5)
            self.assertEqual(len(calls), 1)

    def test_other_texts(self):
        for errors in (common_utils.CONNECT_TIMEOUT, [common_utils.CONNECT_TIMEOUT]):
            connect, _ = self.failing(1, RuntimeError("connect() timed out. Original timeout was 1 ms."))
            self.assertEqual(self.retried(connect, 5, connect_errors=errors), 5)

    def test_a_string_is_one_text(self):
        connect, calls = self.failing(1, RuntimeError("something else"))
        with self.assertRaisesRegex(RuntimeError, "^something else$"):
            self.retried(connect, 5, connect_errors=common_utils.CONNECT_TIMEOUT)
        self.assertEqual(len(calls), 1)

    def test_waiting_leaves_the_random_state_unchanged(self):
        random.seed(3)
        before = random.getstate()
        ports._jitter.random()
        self.assertEqual(random.getstate(), before)


if __name__ == "__main__":
    run_tests()
