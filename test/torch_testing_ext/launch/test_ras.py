"""What NCCL says of ranks that hang is in the report. NCCL is a server of ours that speaks as its RAS subsystem does.

The check `ras` of benchmarks/gpu/run asks the real one.
"""

import contextlib
import os
import socket
import threading
import time
import unittest
from unittest import mock

from kit.outcomes import outcome_of
from kit.ranks import FourRanks
from kit.settings import environ

from torch_testing_ext.launch import environment as environment_module, rank_watch

STATUS = """NCCL version 2.30.7 compiled with CUDA 13.2
CUDA runtime version 13020, driver version 13020

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          2            1          2        2

Errors
======

#0-0 (c13a) INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 127.0.0.1 managing GPU 1
"""


@contextlib.contextmanager
def server(answer, closes=True):
    """Answers the first line of each client, and notes it; `answer` may be several pieces."""
    asked = []
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, connection.makefile("rb") as lines:
                        asked.append(lines.readline())
                        for piece in answer:
                            connection.sendall(piece)
                        if not closes:
                            over.wait()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield {environment_module.ADDRESS: f"127.0.0.1:{listening.getsockname()[1]}"}, asked
        finally:
            over.set()
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join(60)


class TestAsking(unittest.TestCase):
    """Covered on a GPU by the check `ras`."""

    def test_the_answer(self):
        """Covered on a GPU by the check `ras`."""
        with server([STATUS[:100].encode(), STATUS[100:].encode()]) as (environment, asked):
            answer = rank_watch.ask_nccl(environment)
        self.assertEqual([b"verbose status\n"], asked)
        self.assertEqual([line for line in STATUS.splitlines() if line], answer.splitlines())

    def test_a_server_that_does_not_end_its_answer(self):
        """Covered on a GPU by the check `ras`, which stops a rank."""
        with server([b"half of it\n"], closes=False) as (environment, _):
            self.assertEqual("half of it", rank_watch.ask_nccl(environment, timeout=0.5))

    def test_nobody_answers(self):
        """No GPU is involved."""
        with server([]) as (environment, _):
            pass
        self.assertEqual("", rank_watch.ask_nccl(environment))
        began = time.monotonic()
        for odd in (
            {},
            {environment_module.ADDRESS: ""},
            {environment_module.ADDRESS: "host"},
            {environment_module.ADDRESS: ":12"},
            {environment_module.ADDRESS: "a:b"},
        ):
            self.assertEqual("", rank_watch.ask_nccl(odd))
        self.assertLess(time.monotonic() - began, rank_watch.ANSWER_TIMEOUT)

    def test_odd_bytes_and_endless_answers(self):
        """No GPU is involved."""
        with server([b"\xff\xfe\n\n\n"]) as (environment, _):
            self.assertEqual("\ufffd\ufffd", rank_watch.ask_nccl(environment))
        with server([b"x" * 100_000]) as (environment, _):
            self.assertEqual(20_000, len(rank_watch.ask_nccl(environment)))

    def test_ras_that_is_turned_off(self):
        """No GPU is involved."""
        with server([b"status"]) as (environment, asked):
            self.assertEqual("", rank_watch.ask_nccl({**environment, "NCCL_RAS_ENABLE": "0"}))
        self.assertEqual([], asked)


class Hangs(FourRanks):
    world_size = 2

    def _timeout(self):
        return 1.0

    def sleeps(self):
        threading.Event().wait()

    def passes(self):
        pass


class TestInReports(unittest.TestCase):
    """Covered on a GPU by the check `ras`."""

    def test_a_hang_shows_the_answer(self):
        """Covered on a GPU by the check `ras`."""
        with server([STATUS.encode()]) as (environment, asked), environ(**environment):
            seen = outcome_of(Hangs("sleeps"))
        self.assertEqual("error", seen.outcome)
        self.assertIn("NCCL's own status (RAS):\n  NCCL version 2.30.7", seen.message)
        self.assertIn("  Missing communicator data from 1 job process\n", seen.message)
        self.assertEqual(1, len(asked))

    def test_a_pass_asks_nothing(self):
        """No GPU is involved."""
        with server([STATUS.encode()]) as (environment, asked), environ(**environment):
            self.assertEqual("passed", outcome_of(Hangs("passes")).outcome)
        self.assertEqual([], asked)

    def test_a_hang_without_nccl_says_nothing_of_it(self):
        """No GPU is involved."""
        with mock.patch.dict(os.environ):
            os.environ.pop(environment_module.ADDRESS, None)
            self.assertNotIn("NCCL", outcome_of(Hangs("sleeps")).message)


if __name__ == "__main__":
    unittest.main()
