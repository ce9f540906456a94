"""What a class overrides wins, as with PyTorch's bases: no decision is taken before it, or without it."""

import copy
import functools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import unittest
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.ranks import Ranks, outcome_and_told, ranks_told, wait_for

from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext._testing.bases.rank_handles import PipeToParent
from torch_testing_ext.common_distributed import (
    TEST_SKIPS,
    MultiProcessTestCase,
    skip_if_lt_x_gpu,
)
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import AccountWriter


class Things(Ranks):
    """Methods have names without `test`, so that no loader collects them."""

    @skip_if_lt_x_gpu(1000)
    def needs_devices(self):
        self.tell("ran")

    def passes(self):
        self.tell("ran")

    def fails(self):
        self.fail("no")

    def raises_in_one(self):
        if self.rank == 1:
            raise KeyError("k")

    def exits_with_3(self):
        os._exit(3)


class Unwraps(Things):
    """Runs the test without its decorators."""

    def run_test(self, test_name, parent_pipe):
        getattr(self, test_name).__wrapped__.__func__.__wrapped__(self)


class HandlesSkips(Things):
    def _handle_test_skip(self, message):
        self.tell("handled")


class Another(Things):
    """The ranks run another test than the one that the parent waits for."""

    def _current_test_name(self):
        return "passes"


class LikePyTorch(Things):
    """Overrides run_test with what PyTorch's own does."""

    def run_test(self, test_name, parent_pipe):
        receive, send = torch.multiprocessing.Pipe(duplex=False)
        listener = threading.Thread(
            target=MultiProcessTestCase._event_listener, args=(parent_pipe, receive, self.rank), daemon=True
        )
        listener.start()
        try:
            getattr(self, test_name)()
        except unittest.SkipTest:
            sys.exit(TEST_SKIPS["generic"].exit_code)
        except Exception:
            parent_pipe.send(traceback.format_exc())
            sys.exit(MultiProcessTestCase.TEST_ERROR_EXIT_CODE)
        finally:
            send.send(None)
            listener.join()
            parent_pipe.close()

    def skips(self):
        self.skipTest("not today")


class LeavesAtOnce(Things):
    """Ends its process by os._exit after the test."""

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        try:
            super()._run(rank, test_name, file_name, pipe, **kwargs)
        finally:
            os._exit(0)

    def leaves_half_way(self):
        os._exit(0)

    def leaves_half_way_the_second_time(self):
        if hasattr(self, "again"):
            os._exit(0)
        self.again = True


class Twice(LeavesAtOnce):
    def run_test(self, test_name, parent_pipe):
        getattr(self, test_name)()
        getattr(self, test_name)()


class FailsAfterwards(Things):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        super()._run(rank, test_name, file_name, pipe, **kwargs)
        match test_name:
            case "exits_later":
                sys.exit(3)
            case "dies_later":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises_later":
                raise OSError("in clean-up")
            case "skips_later":
                sys.exit(TEST_SKIPS["nccl"].exit_code)

    exits_later = dies_later = raises_later = skips_later = Things.passes


class Judges(Things):
    """Judges the exit codes itself."""

    def _check_return_codes(self, fn, elapsed_time):
        if [process.exitcode for process in self.processes] == [3, 3]:
            return
        texts = [pipe.recv() for pipe in self.pid_to_pipe.values() if pipe.poll(0)]
        if any("KeyError" in text for text in texts):
            raise OSError("a rank has reported a KeyError")
        super()._check_return_codes(fn, elapsed_time)


class Joins(Things):
    """Waits for its processes itself."""

    def _join_processes(self, fn):
        for process in self.processes:
            process.join()
        self.assertEqual([process.exitcode for process in self.processes], [3, 3])


class Starts(Things):
    """Starts its processes itself, as PyTorch's base does."""

    def _start_processes(self, proc):
        self.processes = []
        for rank in range(int(self.world_size)):
            ours, theirs = torch.multiprocessing.Pipe()
            process = proc(
                target=type(self)._run,
                name=f"process {rank}",
                args=(rank, self._current_test_name(), self.file_name, theirs),
                kwargs={"fake_pg": False},
            )
            process.start()
            self.pid_to_pipe[process.pid] = ours
            self.processes.append(process)

    def skips(self):
        self.skipTest("not today")

    def meets(self):
        self.join_group()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)

    def dies_in_one(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    def hangs_in_one(self):
        if self.rank == 1:
            threading.Event().wait()

    def tells_and_raises_in_one(self):
        self.tell("ran")
        self.raises_in_one()

    def raises_a_long_text(self):
        raise ValueError("x" * 1_000_000)


class StartsByFork(Starts):
    def _spawn_processes(self):
        self._start_processes(multiprocessing.get_context("fork").Process)


class StartsOurs(Things):
    """Calls ours with a class of its own."""

    def _spawn_processes(self):
        self._start_processes(torch.multiprocessing.get_context("spawn").Process)


class Cleans(Things):
    """Sets something in setUp that tearDown must remove."""

    log: ClassVar[list] = []

    def setUp(self):
        super().setUp()
        self.log.append(("up", [process.is_alive() for process in self.processes], self.processes[0].exitcode))

    def tearDown(self):
        self.log.append("down")
        super().tearDown()


class TestProcesses(TestCase):
    def test_a_skip_that_is_certain_starts_nothing(self):
        with mock.patch("torch_testing_ext.launch.launch", side_effect=AssertionError("launched")):
            self.assertEqual(outcome_of(Things("needs_devices")).outcome, "skipped")

    def test_set_up_and_tear_down_are_complete_around_such_a_skip(self):
        Cleans.log.clear()
        self.assertEqual(outcome_of(Cleans("needs_devices")).outcome, "skipped")
        self.assertEqual(Cleans.log, [("up", [False, False], 86), "down"])

    def test_ranks_decide_about_skips(self):
        self.assertEqual(ranks_told(Unwraps("needs_devices")), ["ran", "ran"])
        self.assertEqual(ranks_told(HandlesSkips("needs_devices")), ["handled", "handled"])
        self.assertEqual(ranks_told(Another("needs_devices")), ["ran", "ran"])

    def test_an_unknown_decorator_may_call_another_test(self):
        def on_cpu(function):
            @functools.wraps(function)
            def wrapper(self):
                self.passes()

            return wrapper

        class Decorated(Things):
            needs_devices = on_cpu(Things.needs_devices)

        self.assertEqual(ranks_told(Decorated("needs_devices")), ["ran", "ran"])

    def test_a_copy_of_run_test(self):
        self.assertEqual(ranks_told(LikePyTorch("passes")), ["ran", "ran"])
        self.assertEqual(outcome_of(LikePyTorch("skips")).outcome, "skipped")
        seen = outcome_of(LikePyTorch("raises_in_one"))
        self.assertEqual(seen.outcome, "error")
        self.assertRegex(seen.message, r"rank 1 of 2 raised .*KeyError: 'k'(.|\n)*Traceback(.|\n)*raise KeyError\(")

    def test_an_override_may_end_the_process_after_the_test(self):
        self.assertEqual(ranks_told(LeavesAtOnce("passes")), ["ran", "ran"])
        for kind, method in (
            (LeavesAtOnce, "leaves_half_way"),
            (Twice, "leaves_half_way_the_second_time"),
            (LeavesAtOnce, "fails"),
        ):
            with self.subTest(kind=kind.__name__, method=method):
                self.assertIn(outcome_of(kind(method)).outcome, ("failed", "error"))

    def test_what_follows_the_test_counts(self):
        for method, outcome in (("exits", "error"), ("dies", "error"), ("raises", "error"), ("skips", "skipped")):
            with self.subTest(method=method):
                seen, told = outcome_and_told(FailsAfterwards(f"{method}_later"))
                self.assertEqual((seen.outcome, told), (outcome, ["ran", "ran"]), seen.message)

    def test_exit_codes_are_judged_by_an_override(self):
        self.assertEqual(outcome_of(Things("exits_with_3")).outcome, "error")
        self.assertEqual(outcome_of(Judges("exits_with_3")), ("passed", ""))
        self.assertRegex(outcome_of(Judges("raises_in_one")).message, "OSError: a rank has reported a KeyError")
        self.assertRegex(outcome_of(Judges("fails")).message, "RankFailure: all 2 ranks failed")

    def test_processes_are_joined_by_an_override(self):
        self.assertEqual(outcome_of(Joins("exits_with_3")), ("passed", ""))
        self.assertRegex(outcome_and_told(Joins("passes"))[0].message, "Expected 3 but got 0")

    @pytest.mark.slow
    def test_processes_are_started_by_an_override(self):
        seen, told = outcome_and_told(Starts("tells_and_raises_in_one"))
        self.assertEqual((seen.outcome, told), ("error", ["ran", "ran"]), seen.message)
        self.assertRegex(seen.message, "rank 1 of 2 raised .*KeyError: 'k'")
        self.assertEqual(multiprocessing.active_children(), [])

    def test_outcomes_of_such_processes(self):
        for method, outcome, message in (
            ("meets", "passed", "^$"),
            ("needs_devices", "skipped", "logs may say why"),  # all that exit code 86 says
            ("skips", "skipped", "logs may say why"),
            ("raises_a_long_text", "error", "ValueError: xxx"),
            ("exits_with_3", "error", "exited with code 3"),
            ("dies_in_one", "error", "rank 1 of 2 was killed by SIGKILL"),
        ):
            with self.subTest(method=method):
                seen = outcome_of(StartsByFork(method))
                self.assertEqual(seen.outcome, outcome, seen.message)
                self.assertRegex(seen.message, message)
        self.assertEqual(multiprocessing.active_children(), [])

    def test_a_time_out_of_such_processes(self):
        with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", 0.5):
            seen = outcome_of(StartsByFork("hangs_in_one"))
        self.assertRegex(seen.message, "timed out after .*; rank 1 of 2 still running")
        self.assertEqual(multiprocessing.active_children(), [])

    def test_ours_are_started_by_an_override(self):
        self.assertEqual(ranks_told(StartsOurs("passes")), ["ran", "ran"])


class AsksAtTheTimeOut(Things):
    """Does at the time-out what PyTorch's base does there, and keeps what it learns."""

    def setUp(self):
        """Return when rank 0 has ended and rank 1 hangs, so that the time-out cannot come before that."""
        super().setUp()
        if self._testMethodName == "hangs_in_one":
            self.processes[0].join()
            wait_for(Path(f"{self.file_name}.hangs").exists)

    def _get_timedout_process_traceback(self):
        self.asked = {}
        for rank, process in enumerate(self.processes):
            if process.exitcode is None:
                pipe = self.pid_to_pipe[process.pid]
                pipe.send(MultiProcessTestCase.Event.GET_TRACEBACK)
                self.asked[rank] = pipe.recv() if pipe.poll(5) else None
        super()._get_timedout_process_traceback()

    def hangs_in_one(self):
        if self.rank == 1:
            with open(f"{self.file_name}.hangs", "x"):
                threading.Event().wait()


class FailsAtTheTimeOut(AsksAtTheTimeOut):
    def _get_timedout_process_traceback(self):
        raise OSError("no traces today")


class EndsAtTheTimeOut(AsksAtTheTimeOut):
    def _get_timedout_process_traceback(self):
        for process in self.processes:
            process.kill()
            process.join()


class StartedByForkAndAsks(StartsByFork):
    def setUp(self):
        super().setUp()
        self.processes[0].join()

    def _get_timedout_process_traceback(self):
        self.running = [process.is_alive() for process in self.processes]


class TestAtTheTimeOut(TestCase):
    def at_the_time_out(self, test):
        with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", 0.5):
            return outcome_of(test)

    def test_running_ranks_can_be_asked(self):
        test = AsksAtTheTimeOut("hangs_in_one")
        seen = self.at_the_time_out(test)
        self.assertRegex(seen.message, "timed out after .*; rank 1 of 2 still running")
        self.assertEqual(list(test.asked), [1])
        self.assertIn("hangs_in_one", test.asked[1])
        # The thread that has answered may still be ending.
        threads = seen.message.count("hread 0x") - seen.message.count("<no Python frame>")
        self.assertEqual(threads, 1, seen.message)

    def test_an_error_there_is_the_tests(self):
        test = FailsAtTheTimeOut("hangs_in_one")
        seen = self.at_the_time_out(test)
        self.assertEqual(seen.outcome, "error")
        self.assertIn("OSError: no traces today", seen.message)

    def test_ranks_may_be_ended_there(self):
        seen = self.at_the_time_out(EndsAtTheTimeOut("hangs_in_one"))
        self.assertEqual(seen.outcome, "error")

    def test_only_then(self):
        test = FailsAtTheTimeOut("passes")
        self.assertEqual(ranks_told(test), ["ran", "ran"])

    def test_of_processes_that_the_test_has_started(self):
        test = StartedByForkAndAsks("hangs_in_one")
        seen = self.at_the_time_out(test)
        self.assertRegex(seen.message, "timed out after .*; rank 1 of 2 still running")
        self.assertEqual(test.running, [False, True])


class PipeToParentTest(TestCase):
    def test_a_copy(self):
        """An overriding class may keep one."""
        account = AccountWriter(None)
        copied = copy.copy(PipeToParent(account))
        copied.send("an error")
        self.assertEqual((copied.sent_text, account.sent_text), ("an error", "an error"))


if __name__ == "__main__":
    run_tests()
