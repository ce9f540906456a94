"""What NCCL says of ranks that hang is in the report. NCCL is a server of ours that speaks as its RAS subsystem does.

The check `hang-explained` of benchmarks/gpu/run asks the real one.
"""

import contextlib
import itertools
import json
import os
import socket
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from kit.outcomes import outcome_of
from kit.ranks import FourRanks
from kit.settings import environ
from kit.verdicts import report_on

from torch_testing_ext.launch import Case, RankEnding, RankReport, nccl_status, rank_variables
from torch_testing_ext.launch.watching.evidence import RankEvidence


def process(rank, pid, calls, **status):
    """A rank as NCCL 2.30 describes it."""
    flags = dict.fromkeys(("finalize_called", "destroy_flag", "abort_flag"), False)
    status = {"init_state": 0, "async_error": 0, **flags, **status}
    place = {"rank": rank, "host": "127.0.0.1", "pid": pid, "cuda_dev": rank, "nvml_dev": rank}
    return {**place, "status": status, "collective_counts": {"Broadcast": 1, "AllReduce": calls - 1}}


def missing(rank, pid, dead=False, answers=False):
    status = {"unresponsive": not answers, "considered_dead": dead}
    return {"rank": rank, "host": "127.0.0.1", "pid": pid, "cuda_dev": rank, "nvml_dev": rank, "status": status}


def communicator(*ranks, lost=(), name="0xc13a"):
    size = len(ranks) + len(lost)
    counts = {"size": size, "ranks_count": len(ranks), "missing_ranks_count": len(lost)}
    return {"hash": name, "secondary_hash": "0x1:0x2", **counts, "ranks": list(ranks), "missing_ranks": list(lost)}


def answer_of(*communicators):
    """The answer to both lines of the question."""
    document = {
        "nccl_version": "2.30.7",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }
    return b"OK\n" + json.dumps(document, indent=2).encode()


@contextlib.contextmanager
def server(answer, closes=True, deaf=0):
    """Answers the first line of each client, and notes it; `answer` may be several pieces.

    The first clients, as many as `deaf`, hear nothing, as from a process that is stopped.
    """
    asked, unheard = [], contextlib.ExitStack()
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):
                for number in itertools.count():
                    connection, _ = listening.accept()
                    if number < deaf:
                        unheard.enter_context(connection)
                        continue
                    with connection, connection.makefile("rb") as lines:
                        asked.append(lines.readline())
                        for piece in answer:
                            connection.sendall(piece)
                        if not closes:
                            over.wait()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield {rank_variables.ADDRESS: f"127.0.0.1:{listening.getsockname()[1]}"}, asked
        finally:
            over.set()
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            unheard.close()


class TestAsking(unittest.TestCase):
    """Covered on a GPU by the check `hang-explained`."""

    def test_the_answer(self):
        """Covered on a GPU by the check `hang-explained`."""
        answer = answer_of(communicator(process(0, 100, 4), process(1, 101, 3)))
        with server([answer[:100], answer[100:]]) as (environment, asked):
            status = nccl_status.ask_nccl(environment)
        self.assertEqual([b"SET FORMAT json\n"], asked)
        calls = {pid: dict(rank.calls) for pid, rank in status.processes.items()}
        self.assertEqual(("2.30.7", {100: {"0xc13a": 4}, 101: {"0xc13a": 3}}), (status.version, calls))

    def test_an_answer_that_is_not_complete(self):
        """Covered on a GPU by no check."""
        with server([answer_of(communicator())[:-5]], closes=False) as (environment, _):
            self.assertIsNone(nccl_status.ask_nccl(environment, timeout=0.5))

    def test_a_process_that_is_stopped(self):
        """No check stops a rank. All processes of a job listen, and the system chooses one for each connection."""
        answer = [answer_of(communicator(process(0, 100, 4)))]
        for deaf, known in ((1, True), (2, True), (3, False)):
            with (
                mock.patch.object(nccl_status, "FIRST_WORD_TIMEOUT", 0.1),
                server(answer, deaf=deaf) as (environment, asked),
            ):
                self.assertEqual(known, nccl_status.ask_nccl(environment) is not None)
            self.assertEqual(int(known), len(asked))

    def test_nobody_answers(self):
        """No GPU is involved."""
        with server([]) as (environment, _):
            pass
        self.assertIsNone(nccl_status.ask_nccl(environment))
        began = time.monotonic()
        for odd in (
            {},
            {rank_variables.ADDRESS: ""},
            {rank_variables.ADDRESS: "host"},
            {rank_variables.ADDRESS: ":12"},
            {rank_variables.ADDRESS: "a:b"},
        ):
            self.assertIsNone(nccl_status.ask_nccl(odd))
        self.assertLess(time.monotonic() - began, nccl_status.ANSWER_TIMEOUT)

    def test_odd_answers(self):
        """No GPU is involved. An NCCL that does not know the first line answers the second with text."""
        text = b"ERROR: Unknown command SET FORMAT json\nNCCL version 2.27.3 compiled with CUDA 12.9\n"
        deep = b"OK\n" + 100_000 * b'{"a":'
        for odd in (b"", b"\xff\xfe\n\n\n", b"OK\n", b"OK\n[]", b"OK\n{}", b'OK\n{"communicators": 3}', text, deep):
            self.assertIsNone(nccl_status.read_status(odd), odd)

    def test_parts_that_are_missing_or_odd(self):
        """No GPU is involved. What is known of the other processes counts."""
        good = process(0, 100, 4)
        for odd in (
            {},
            {"pid": 101},
            {"pid": 101, "status": "gone", "collective_counts": [1]},
            {"pid": 101, "status": {"async_error": 1e999}, "collective_counts": {"AllReduce": None}},
            {"pid": [101]},
            None,
        ):
            for ranks, lost in (([good, odd], []), ([good], [odd])):
                found = communicator(*ranks, lost=lost)
                status = nccl_status.read_status(answer_of(3, {}, found))
                self.assertEqual({"0xc13a": 4}, status.processes[100].calls)
        without = {key: value for key, value in communicator(good).items() if key != "missing_ranks"}
        self.assertEqual([100], [*nccl_status.read_status(answer_of(without)).processes])

    def test_ras_that_is_turned_off(self):
        """No GPU is involved."""
        with server([answer_of()]) as (environment, asked):
            self.assertIsNone(nccl_status.ask_nccl({**environment, "NCCL_RAS_ENABLE": "0"}))
        self.assertEqual([], asked)


class TestSuspects(unittest.TestCase):
    """The ranks on which the others wait. Covered on a GPU by the checks `hang-explained` and `hang-sources`."""

    def suspects(self, *communicators):
        status = nccl_status.read_status(answer_of(*communicators))
        return nccl_status.suspects({pid - 100: rank for pid, rank in sorted(status.processes.items())})

    def test_table(self):
        """Covered on a GPU by the checks `hang-explained` and `hang-sources`."""
        zero, one, other = process(0, 100, 4), process(1, 101, 4), process(1, 101, 2)
        fewer = "NCCL has seen fewer collectives from"
        for communicators, expected in (
            ([communicator(zero, one)], ((), "")),
            ([communicator(zero, other)], ((1,), fewer)),
            ([communicator(zero, lost=[missing(1, 101)])], ((1,), "NCCL gets no answer from")),
            ([communicator(zero, lost=[missing(1, 101, dead=True)])], ((1,), "dead, according to NCCL:")),
            ([communicator(zero, one), communicator(zero, other, name="0xb")], ((1,), fewer)),
            ([communicator(lost=[missing(0, 100), missing(1, 101)])], ((), "")),
            # Rank 1 has not come to the communicator yet, or has left it.
            ([communicator(zero, lost=[missing(1, 101, answers=True)])], ((1,), "NCCL misses a communicator in")),
            # Rank 1 has left a communicator before rank 0, which is late everywhere.
            (
                [communicator(other, process(0, 100, 1)), communicator(lost=[missing(1, 101, answers=True)])],
                ((0,), fewer),
            ),
            # One that NCCL has lost sight of.
            ([communicator(zero, lost=[missing(1, -1, dead=True)])], ((), "")),
        ):
            with self.subTest(expected=expected):
                self.assertEqual(expected, self.suspects(*communicators))

    def test_trouble_of_a_rank(self):
        """No GPU is involved."""
        for rank, expected in (
            (process(0, 1, 1), ""),
            (process(0, 1, 1, async_error=6), "NCCL reports error 6"),
            (process(0, 1, 1, init_state=3), "NCCL reports error 3"),
            # In progress, which is none.
            (process(0, 1, 1, async_error=7, init_state=7), ""),
            (process(0, 1, 1, abort_flag=True), "NCCL has aborted its communicator"),
            (missing(0, 1), "NCCL gets no answer from it"),
            (missing(0, 1, dead=True), "NCCL considers it dead"),
            (missing(0, 1, answers=True), "NCCL misses a communicator in it"),
        ):
            lost = [rank] if "unresponsive" in rank["status"] else []
            status = nccl_status.read_status(answer_of(communicator(*([] if lost else [rank]), lost=lost)))
            self.assertEqual(expected, status.processes[1].trouble)


class TestHints(unittest.TestCase):
    """What to try where NCCL fails. Covered on no GPU: no machine of ours blocks NCCL."""

    def test_shared_memory_of_a_container(self):
        """No GPU is involved."""
        for blocks, expected in (
            (16 << 10, "/dev/shm has 64 MiB, NCCL may need more: docker run --shm-size=1g"),
            (1 << 20, "with NCCL_P2P_DISABLE=1 it passes if transfers between GPUs are blocked"),
        ):
            with mock.patch.object(
                os, "statvfs", lambda path, blocks=blocks: mock.Mock(f_blocks=blocks, f_frsize=4096)
            ):
                self.assertEqual(expected, nccl_status.hint())

    def test_ranks_that_share_a_gpu(self):
        """Covered by no check: it appears where NCCL hangs."""
        shared = "ranks that share a GPU may block each other in NCCL: with NCCL_MULTI_RANK_GPU_ENABLE=0 they use gloo"
        for enabled, is_told in (("", True), ("1", True), ("0", False)):
            with environ(TORCH_TESTING_EXT_RANKS_PER_GPU="4", NCCL_MULTI_RANK_GPU_ENABLE=enabled):
                self.assertEqual(is_told, nccl_status.hint() == shared)

    def test_which_failures_have_one(self):
        """No GPU is involved."""
        of_nccl = report_on(1, RankEnding.ERROR, summary="NCCL error", type_name="DistBackendError", code=10)
        other = report_on(1, RankEnding.ERROR, summary="no", type_name="RuntimeError", code=10)
        for report, expected in ((of_nccl, 1), (other, 0)):
            reports = (RankReport(0, RankEnding.PASSED), report)
            verdict = RankEvidence(reports).verdict(Case("T.test_x"))
            self.assertEqual(expected, verdict.failure.remarks.count(nccl_status.hint()), verdict.message)


class Hangs(FourRanks):
    world_size = 2

    def _timeout(self):
        return 1.0

    def sleeps(self):
        if "PIDS_OF_RANKS" in os.environ:
            Path(os.environ["PIDS_OF_RANKS"], str(self.rank)).write_text(str(os.getpid()))
        threading.Event().wait()

    def passes(self):
        pass


class OfTheseRanks:
    """The answer about the ranks that have left their pids in a folder: rank 1 does not answer NCCL."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def __iter__(self):
        first, second = (int((self.folder / str(rank)).read_text()) for rank in range(2))
        yield answer_of(communicator(process(0, first, 4), lost=[missing(1, second)]))


class TestInReports(unittest.TestCase):
    """Covered on a GPU by the check `hang-explained`."""

    def test_a_hang_shows_the_answer(self):
        """Covered on a GPU by the check `hang-explained`. Ranks hang in no collective that torch has recorded."""
        with (
            tempfile.TemporaryDirectory() as folder,
            server(OfTheseRanks(folder)) as (environment, asked),
            environ(**environment, PIDS_OF_RANKS=folder),
        ):
            seen = outcome_of(Hangs("sleeps"))
        self.assertEqual("error", seen.outcome)
        self.assertRegex(seen.message, r"timed out after .* s; NCCL gets no answer from rank 1 of 2")
        self.assertIn(
            "NCCL's own status (RAS):\n  rank 0: 4 collectives in 0xc13a\n  rank 1: NCCL gets no", seen.message
        )
        self.assertEqual(1, len(asked))

    def test_a_pass_asks_nothing(self):
        """No GPU is involved."""
        with server([answer_of()]) as (environment, asked), environ(**environment):
            self.assertEqual("passed", outcome_of(Hangs("passes")).outcome)
        self.assertEqual([], asked)

    def test_a_hang_without_nccl_says_nothing_of_it(self):
        """No GPU is involved."""
        with mock.patch.dict(os.environ):
            os.environ.pop(rank_variables.ADDRESS, None)
            self.assertNotIn("NCCL", outcome_of(Hangs("sleeps")).message)


if __name__ == "__main__":
    unittest.main()
