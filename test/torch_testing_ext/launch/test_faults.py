"""Tests real faults of ranks of every kind: the outcome, the message, the time, and that nothing is left."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from kit.leftovers import nothing_left
from kit.outcomes import outcome_of
from kit.ranks import FourRanks, wait_for

from torch_testing_ext._collectives.failure import WHOLE_ACCOUNT
from torch_testing_ext._testing.marks.settings_of_tests import sanitize
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch.account_writer import AccountWriter
from torch_testing_ext.launch.accounts import AccountFile, RankEnding, read_account
from torch_testing_ext.launch.watching import run_watcher
from torch_testing_ext.launch.watching.rules import OWN_PROCESSES


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class _BrokenStream:
    def __getattr__(self, name):
        sys.exit(1)


class Faults(FourRanks):
    def all_pass(self):
        self.join_group()
        dist.all_reduce(torch.ones(1))

    def raises(self):
        self.join_group()
        if self.rank == 1:
            raise ValueError("the reason")
        dist.all_reduce(torch.ones(1))

    def raises_before_a_collective_in_finally(self):
        self.join_group()
        try:
            if self.rank == 1:
                raise ValueError("the reason")
            dist.all_reduce(torch.ones(1))
        finally:
            dist.barrier()

    def aborts_without_threads(self):
        if self.rank == 1:
            # From now on, the stack of a thread has more bytes than there are addresses.
            libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(256)
            libc.pthread_attr_init(attributes)
            libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(2**47))
            self.assertEqual(libc.pthread_setattr_default_np(attributes), 0)
            # std::terminate
            ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
        time.sleep(1000)

    def raises_before_a_lost_peer(self):
        self.join_group()
        told = dist.FileStore(f"{self.file_name}.told", self.world_size)
        if self.rank == 0:
            told.set("pid of rank 0", str(os.getpid()))
            told.wait(["rank 1 is there"])
            os._exit(3)
        try:
            if self.rank == 1:
                self.fail("the reason")
        finally:
            told.set(f"rank {self.rank} is there", "")
            try:
                dist.barrier()
            finally:
                lost = Path("/proc", told.get("pid of rank 0").decode())
                wait_for(lambda: not lost.exists())  # until its end was noticed

    def two_raise(self):
        with_second = Path(f"{self.file_name}.second")
        if self.rank == 1:
            with_second.touch()
            wait_for(lambda: self.account_of(3) is not None)
            raise KeyError("second")
        if self.rank == 3:
            wait_for(with_second.exists)
            raise ValueError("first")

    def account_of(self, rank):
        return read_account(Path(self.file_name).with_name(f"rank{rank}.account"))

    def fails(self):
        self.assertEqual(self.rank, 0)

    def _dies_by(self, number):
        self.join_group()
        if self.rank == 2:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(1))

    def dies_by_sigkill(self):
        self._dies_by(signal.SIGKILL)

    def dies_by_sigabrt(self):
        self._dies_by(signal.SIGABRT)

    def dies_by_a_null_pointer(self):
        if self.rank == 1:
            print("about to read address 0")
            ctypes.string_at(0)

    def dies_while_others_sleep(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def dies_while_others_ignore_sigterm(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.join_group()
        dist.barrier()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def exits_with_0(self):
        if self.rank == 1:
            os._exit(0)

    def exits_with_3(self):
        if self.rank == 1:
            os._exit(3)

    def sys_exits_with_0(self):
        if self.rank == 1:
            sys.exit(0)

    def sys_exits_with_3(self):
        if self.rank == 1:
            sys.exit(3)

    def sys_exits_with_a_text(self):
        if self.rank == 1:
            sys.exit("could not go on")

    def rank_1_skips(self):
        if self.rank == 1:
            raise unittest.SkipTest("not here")

    def all_skip(self):
        raise unittest.SkipTest("not today")

    def rank_0_skips_rank_1_crashes(self):
        if self.rank == 0:
            raise unittest.SkipTest("not here")
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    def one_skips_others_wait(self):
        if self.rank == 0:
            raise unittest.SkipTest("not here")
        self.join_group()

    def cannot_join(self):
        if self.rank == 1:
            raise RuntimeError("no such backend")
        self.join_group()

    def closes_all_descriptors(self):
        if self.rank == 1:
            os.closerange(0, 4096)

    def closes_all_descriptors_and_opens_others(self):
        if self.rank == 1:
            os.closerange(3, 4096)
            self.files = [open(os.devnull, "w") for _ in range(50)]  # noqa: SIM115

    def closes_all_descriptors_and_fails(self):
        if self.rank == 1:
            os.closerange(3, 4096)
            self.fail("for a reason of its own")

    def breaks_its_streams(self):
        if self.rank == 0:
            sys.stdout = sys.stderr = None
        elif self.rank == 1:
            sys.stdout.close()
            sys.stderr.close()
        elif self.rank == 2:
            sys.stdout = sys.stderr = object()
        else:
            sys.stdout = sys.stderr = _BrokenStream()

    def has_a_long_message(self):
        raise ValueError("begin " + "x" * 300_000 + " end")

    def is_unpicklable(self):
        raise Unpicklable

    def is_unprintable(self):
        raise Unprintable

    def names_a_file_that_is_not_utf_8(self):
        raise FileNotFoundError("no file b\udcff.bin")

    def recurses(self):
        self.recurses.__func__(self)

    def prints_much(self):
        if self.rank == 1:
            block = "y" * 1023 + "\n"
            for _ in range(50 * 1024):
                sys.stdout.write(block)
            print("the last line")
            raise ValueError("after 50 MB")

    def leaves_grandchildren(self):
        if self.rank == 1:
            subprocess.Popen(["sleep", "1001"])
        if self.rank == 2:
            # In a separate session: outside the rank's group.
            subprocess.Popen(["sleep", "1002"], start_new_session=True)

    def closes_its_stdout(self):
        sys.stdout.close()
        os.close(1)
        os.close(2)
        if self.rank == 1:
            raise ValueError("without a word")

    def raises_from_clean_up(self):
        if self.rank == 1:
            self.addCleanup(self.fail, "in clean-up")
            raise ValueError("in the test")


@sanitize("nan")
class Sanitized(Faults):
    pass


class FaultTest(TestCase):
    """The parent's report of a rank's fault."""

    @classmethod
    def setUpClass(cls):
        outcome_of(Faults("all_pass"))  # the server is there from now on, and counted before and after

    def check(self, method, outcome, *parts, case=Faults):
        """The outcome, these parts in the message in this order, in time, and nothing is left."""
        with nothing_left(self):
            seen = outcome_of(case(method))
        self.assertEqual(seen.outcome, outcome, seen.message)
        at = 0
        for part in parts:
            found = seen.message.find(part, at)
            self.assertGreaterEqual(found, 0, f"{part!r} is not in, or not in this order:\n{seen.message[-5000:]}")
            at = found + len(part)
        self.assertNotIn("timed out", seen.message)  # what ends a test is the fault, at once
        return seen

    def test_all_pass(self):
        self.check("all_pass", "passed")

    def test_raises(self):
        seen = self.check(
            "raises",
            "error",
            "rank 1 of 4 raised",
            "ValueError: the reason",
            "rank 1: error",
            "rank 0: error",
            "because of rank 1",
            "rank 1's traceback:",
            'raise ValueError("the reason")',
            "To run it alone:",
            "raises",
        )
        self.assertNotIn("rank 0's traceback", seen.message)

    def test_an_exception_in_flight(self):
        """The rank hangs or fails in a collective of its `finally`: its own exception is what has happened."""
        for case in (Faults, Sanitized):
            with self.subTest(case=case.__name__):
                self.check(
                    "raises_before_a_collective_in_finally",
                    "error",
                    "rank 1 of 4 raised",
                    "ValueError: the reason",
                    "terminated, in a `finally`",
                    'raise ValueError("the reason")',
                    case=case,
                )

    def test_an_exception_in_flight_before_a_lost_peer(self):
        seen = self.check(
            "raises_before_a_lost_peer", "error", "rank 0 of 4 exited with code 3", "AssertionError: the reason"
        )
        self.assertIn('self.fail("the reason")', seen.message)

    def test_no_thread_can_be_started(self):
        """gloo aborts for that, and says only "terminate called without an active exception"."""
        self.check(
            "aborts_without_threads",
            "error",
            "rank 1 of 4 raised RuntimeError: can't start new thread. The limit of processes and threads is reached",
            "start fewer ranks; then killed by SIGABRT",
        )

    def test_two_raise(self):
        patient = replace(OWN_PROCESSES, after_failure=60.0)
        with mock.patch.object(run_watcher, "OWN_PROCESSES", patient):
            self.check(
                "two_raise",
                "error",
                "rank 3 of 4 raised",
                "ValueError: first",
                "rank 1: error",
                "KeyError: 'second'",
                "rank 3's traceback:",
                "rank 1's traceback:",
            )

    def test_an_assertion_is_a_failure(self):
        self.check("fails", "failed", "rank 0: passed after", "AssertionError")

    def test_death_by_signal(self):
        for method, name in (("dies_by_sigkill", "SIGKILL"), ("dies_by_sigabrt", "SIGABRT")):
            with self.subTest(name):
                self.check(method, "error", f"rank 2 of 4 was killed by {name}", "rank 2: killed", "rank 0: error")

    def test_out_of_memory_is_suspected(self):
        self.check("dies_by_sigkill", "error", "(out of memory?)")

    def test_segmentation_fault(self):
        self.check(
            "dies_by_a_null_pointer",
            "error",
            "rank 1 of 4 was killed by SIGSEGV",
            "about to read address 0",
            "ctypes.string_at(0)" if sys.version_info >= (3, 14) else "in dies_by_a_null_pointer",
        )

    def test_a_death_is_reported_at_once(self):
        """The others would sleep forever: they are ended, and the message shows where they were."""
        self.check(
            "dies_while_others_sleep",
            "error",
            "rank 1 of 4 was killed by SIGKILL",
            "rank 0: still running",
            "in dies_while_others_sleep (time.sleep(1000))",
        )

    def test_ignoring_sigterm_does_not_help(self):
        self.check("dies_while_others_ignore_sigterm", "error", "rank 1 of 4 was killed by SIGKILL")

    def test_early_exits(self):
        for method, code in (
            ("exits_with_0", 0),
            ("exits_with_3", 3),
            ("sys_exits_with_0", 0),
            ("sys_exits_with_3", 3),
            ("sys_exits_with_a_text", 1),
        ):
            with self.subTest(method):
                self.check(method, "error", f"rank 1 of 4 exited with code {code}", "before the test finished")

    def test_the_message_of_sys_exit_is_shown(self):
        self.check("sys_exits_with_a_text", "error", "could not go on")

    def test_skips(self):
        self.check("all_skip", "skipped", "not today")
        self.check("rank_1_skips", "failed", "rank 1 skipped, ranks 0, 2, 3 did not", "skipped after")
        self.check("rank_0_skips_rank_1_crashes", "error", "rank 1 of 4 was killed by SIGSEGV", "rank 0: skipped")

    def test_one_skips_and_the_others_wait_for_it(self):
        self.check("one_skips_others_wait", "failed", "rank 0 skipped, ranks 1-3 did not", "in one_skips_others")

    def test_set_up_of_the_group_raises(self):
        self.check("cannot_join", "error", "rank 1 of 4 raised", "RuntimeError: no such backend")

    def test_exceptions_of_all_kinds(self):
        self.check("has_a_long_message", "error", "ValueError: begin", "characters cut here", " end")
        self.check("is_unpicklable", "error", "Unpicklable: holds a lock")
        self.check("is_unprintable", "error", "Unprintable", "its str() raised RuntimeError")
        self.check("recurses", "error", "RecursionError")
        self.check("names_a_file_that_is_not_utf_8", "error", r"FileNotFoundError: no file b\udcff.bin")

    def test_much_output(self):
        seen = self.check("prints_much", "error", "ValueError: after 50 MB", "the last line")
        self.assertLess(len(seen.message), 100_000)

    def test_grandchildren_are_ended_and_reported(self):
        import contextlib
        import io

        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            self.check("leaves_grandchildren", "passed")
        self.assertIn("rank 1 left running (now terminated): pid", stderr.getvalue())
        self.assertIn("sleep 1001", stderr.getvalue())
        self.assertIn("sleep 1002", stderr.getvalue())

    def test_a_forked_child_does_not_write_the_account_of_its_rank(self):
        """A child that a test forks without exec reaches the end of the rank's code, too."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "account")
            file = AccountFile.open(path)
            report = AccountWriter(file)
            report.passed()
            child = os.fork()
            if child == 0:
                report.failed(ValueError("in the child"), assertion=False)
                os._exit(0)
            os.waitpid(child, 0)
            file.close()
            self.assertIs(read_account(path).ending, RankEnding.PASSED)

    def test_without_stdout(self):
        self.check("closes_its_stdout", "error", "rank 1 of 4 raised", "ValueError: without a word", "rank 0: passed")

    def test_broken_streams_are_no_failure(self):
        self.check("breaks_its_streams", "passed")

    def test_closing_all_descriptors_is_named(self):
        named = "rank 1 of 4 raised", "the test closed file descriptors of its process", "rank 0: passed"
        self.check("closes_all_descriptors", "error", *named)
        self.check("closes_all_descriptors_and_opens_others", "error", *named)
        self.check("closes_all_descriptors_and_fails", "error", *named, "AssertionError: for a reason of its own")

    def test_the_tests_error_wins_over_clean_up(self):
        seen = self.check("raises_from_clean_up", "error", "rank 1: error", "ValueError: in the test")
        self.assertNotIn("AssertionError: in clean-up", seen.message)
        self.assertNotIn("in clean-up", seen.message.partition(WHOLE_ACCOUNT)[2])


if __name__ == "__main__":
    run_tests()
