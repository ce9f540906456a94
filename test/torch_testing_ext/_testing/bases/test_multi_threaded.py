"""MultiThreadedTestCase and spawn_threads_and_init_comms: how ranks that are threads start, end and are judged."""

from __future__ import annotations

import sys
import threading
import unittest
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from kit.outcomes import Seen, outcome_of

from torch_testing_ext._testing.bases import ranked_test_case, threaded_ranks
from torch_testing_ext.common_distributed import (
    TEST_SKIPS,
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
    spawn_threads_and_init_comms,
)
from torch_testing_ext.common_utils import (
    TestCase,
    instantiate_parametrized_tests as instantiate,
    parametrize,
    run_tests,
)

NEVER = threading.Event()  # set only after a test, so that its threads end


class Threads(MultiThreadedTestCase):
    """A base for test subjects, whose methods have names without `test`, so that no loader collects them."""

    world_size = 3
    seen: ClassVar[list[Any]] = []  # values from the threads

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()


class Things(Threads):
    def passes(self) -> None:
        dist.barrier()

    def tells_ranks(self) -> None:
        self.seen.append((self.rank, dist.get_rank(), threading.current_thread().daemon, id(self)))

    def fails_in_one(self) -> None:
        if self.rank == 1:
            self.fail("as told")
        dist.barrier()

    def raises_in_the_last(self) -> None:
        if self.rank == 2:
            raise KeyError("k")

    def raises_in_two(self) -> None:
        if self.rank != 0:
            raise ValueError(f"rank {self.rank}")

    def returns_early(self) -> None:
        if self.rank != 1:
            dist.all_reduce(torch.ones(1))

    def calls_another_collective(self) -> None:
        if self.rank == 1:
            dist.broadcast(torch.ones(1), src=0)
        else:
            dist.all_reduce(torch.ones(1))

    def passes_another_shape(self) -> None:
        dist.broadcast(torch.ones(1 + self.rank), src=0)

    def hangs_in_one(self) -> None:
        dist.barrier()
        if self.rank == 1:
            NEVER.wait()
        dist.all_reduce(torch.ones(4))

    def spins_in_one(self) -> None:
        if self.rank == 1:
            while not NEVER.is_set():
                pass

    def fails_while_another_hangs(self) -> None:
        if self.rank == 1:
            NEVER.wait()
        if self.rank == 2:
            self.fail("as told")

    def skips(self) -> None:
        self.skipTest("not today")

    def skips_in_one(self) -> None:
        if self.rank == 1:
            self.skipTest("not today")

    def exits_with_a_skip(self) -> None:
        sys.exit(TEST_SKIPS["nccl"].exit_code)

    def exits(self) -> None:
        if self.rank == 1:
            sys.exit(3)

    def exits_with_zero(self) -> None:
        if self.rank == 1:
            sys.exit(0)

    @skip_if_lt_x_gpu(1000)
    def needs_devices(self) -> None: ...

    @unittest.expectedFailure
    def fails_as_expected(self) -> None:
        self.fail("as expected")

    @unittest.expectedFailure
    def passes_against_expectation(self) -> None: ...

    def cleanup_fails(self) -> None:
        self.addCleanup(self.fail, "in clean-up")

    def subtest_fails(self) -> None:
        with self.subTest(size=2):
            self.fail("within")

    def leaves_without_its_group(self) -> None:
        dist.destroy_process_group()


class OwnSetUp(Threads):
    """Set-up and tear-down in each thread, which fail where `where` says."""

    where: ClassVar[set[str]] = set()

    def perThreadSetUp(self) -> None:
        self.seen.append(("up", self.rank))
        self.addCleanup(self.seen.append, ("clean", self.rank))
        self._fail_at("set-up")

    def perThreadTearDown(self) -> None:
        self.seen.append(("down", self.rank))
        self._fail_at("tear-down")

    def _fail_at(self, place: str) -> None:
        if self.rank == 1 and place in self.where:
            raise RuntimeError(f"failed in {place}")

    def passes(self) -> None:
        self._fail_at("test")


class BrokenSetUp(Things):
    def setUp(self) -> None:
        super().setUp()
        raise RuntimeError("after the threads were started")


class Forgetful(MultiThreadedTestCase):
    def passes(self) -> None: ...


def run(test: unittest.TestCase, timeout: float = 60.0) -> Seen:
    with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", timeout):
        return outcome_of(test)


class ThreadsTest(TestCase):
    """After every test, c10d's own world is restored, and no thread is left."""

    def setUp(self) -> None:
        super().setUp()
        NEVER.clear()
        Threads.seen.clear()
        world = dist.distributed_c10d._world
        self.addCleanup(lambda: self.assertIs(dist.distributed_c10d._world, world))
        self.addCleanup(lambda: self.assertFalse(dist.is_initialized()))
        threads = threading.enumerate()
        self.addCleanup(lambda: self.assertEqual(threading.enumerate(), threads))
        self.addCleanup(self.let_threads_go)

    def let_threads_go(self) -> None:
        NEVER.set()
        for thread in threading.enumerate():
            if thread.name.startswith("rank "):
                thread.join()


class TestOutcomes(ThreadsTest):
    @parametrize(
        "name,outcome,message",
        [
            ("passes", "passed", ""),
            (
                "fails_in_one",
                "failed",
                r"^.*rank 1 of 3 failed: AssertionError: as told",
            ),
            ("raises_in_the_last", "error", "rank 2 of 3 raised .*KeyError: 'k'"),
            ("raises_in_two", "error", "ValueError: rank 1(.|\n)*ValueError: rank 2|ValueError: rank 2(.|\n)*rank 1"),
            ("returns_early", "error", "left alone in all_reduce: rank 1 has passed"),
            (
                "calls_another_collective",
                "failed",
                r"^.*rank 1 calls broadcast \[1\] float32, the others (.|\n)*: all_reduce by rank 0, 2; broadcast by",
            ),
            (
                "passes_another_shape",
                "failed",
                r"^.*rank 0 calls broadcast \[1\] float32, rank 1 calls broadcast \[2\] (.|\n)*shape .* is invalid",
            ),
            ("skips", "skipped", "^not today$"),
            ("skips_in_one", "failed", "rank 1 skipped, ranks 0, 2 did not"),
            ("exits_with_a_skip", "skipped", "NCCL"),
            ("exits", "error", "rank 1 of 3 exited with code 3 .*before the test finished"),
            ("exits_with_zero", "error", "rank 1 of 3 exited with code 0 .*before the test finished"),
            ("needs_devices", "skipped", "at least 1000"),
            ("fails_as_expected", "expected failure", "as expected"),
            ("passes_against_expectation", "unexpected success", ""),
            ("cleanup_fails", "failed", "in clean-up"),
            ("subtest_fails", "failed", r"in subtest \(size=2\): AssertionError: within"),
            ("leaves_without_its_group", "passed", ""),
        ],
        name_fn=lambda name, outcome, message: name,
    )
    def test_of(self, name: str, outcome: str, message: str) -> None:
        seen = run(Things(name))
        self.assertEqual(seen.outcome, outcome, seen.message)
        self.assertRegex(seen.message, message or "^$")

    def test_a_rank_left_alone_is_no_culprit(self) -> None:
        seen = run(Things("fails_in_one"))
        alone = "left alone in barrier: rank 1 has failed (lost its peer because of rank 1)"
        self.assertEqual(seen.message.count(alone), 2)
        self.assertRegex(seen.message, "To run it alone:\n  python -m unittest .*Things.fails_in_one")

    def test_as_a_decorator(self) -> None:
        class Decorated(TestCase):
            @spawn_threads_and_init_comms(world_size=2)
            def fails(self) -> None:
                self.assertEqual(dist.get_rank(), 0)

            @spawn_threads_and_init_comms
            def skips(self) -> None:
                self.skipTest("not today")

        self.assertRegex(run(Decorated("fails")).message, r"rank 1 of 2 failed: (.|\n)*\(.*Decorated.fails, ")
        self.assertEqual(run(Decorated("skips")), ("skipped", "not today"))


class TestThreadsThemselves(ThreadsTest):
    def test_each_has_an_instance_and_a_rank(self) -> None:
        self.assertEqual(run(Things("tells_ranks")).outcome, "passed")
        self.assertEqual(sorted(entry[:3] for entry in Threads.seen), [(0, 0, True), (1, 1, True), (2, 2, True)])
        self.assertEqual(len({entry[3] for entry in Threads.seen}), 3)

    def test_set_up_and_tear_down(self) -> None:
        self.assertEqual(run(OwnSetUp("passes")).outcome, "passed")
        for rank in range(3):
            self.assertEqual([what for what, of in Threads.seen if of == rank], ["up", "clean", "down"])

    @parametrize("where", ["set-up", "test", "tear-down"], name_fn=lambda where: where.replace("-", "_"))
    def test_error_in(self, where: str) -> None:
        with mock.patch.object(OwnSetUp, "where", {where}):
            seen = run(OwnSetUp("passes"))
        self.assertRegex(seen.message, f"rank 1 of 3 raised .*RuntimeError: failed in {where}")
        self.assertEqual(Threads.seen.count(("clean", 1)), 1)
        self.assertEqual(Threads.seen.count(("down", 1)), 1)

    def test_an_exit_in_tear_down_hides_no_error(self) -> None:
        leave = mock.Mock(side_effect=SystemExit(TEST_SKIPS["generic"].exit_code))
        with mock.patch.multiple(OwnSetUp, where={"test"}, perThreadTearDown=leave):
            self.assertRegex(run(OwnSetUp("passes")).message, "rank 1 of 3 raised .*RuntimeError: failed in test")

    def test_the_first_error_is_reported(self) -> None:
        with mock.patch.object(OwnSetUp, "where", {"test", "tear-down"}):
            self.assertRegex(run(OwnSetUp("passes")).message, "rank 1 of 3 raised .*RuntimeError: failed in test")

    def test_error_in_setting_up_the_group(self) -> None:
        with mock.patch.object(threaded_ranks.dist, "init_process_group", side_effect=OSError("no group")):
            self.assertRegex(run(Things("passes")).message, "raised .*OSError: no group")

    def test_threads_end_if_set_up_fails_later(self) -> None:
        self.assertRegex(run(BrokenSetUp("hangs_in_one")).message, "after the threads were started")

    def test_none_started(self) -> None:
        self.assertRegex(run(Forgetful("passes")).message, r"Forgetful.setUp\(\) must call self._spawn_threads\(\)")

    def test_one_that_cannot_start(self) -> None:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "rank 1":
                raise RuntimeError("can't start new thread")
            start(thread)

        with mock.patch.object(threading.Thread, "start", refuse):
            self.assertIn("can't start new thread", run(Things("passes")).message)
        self.assertEqual(run(Things("passes")).outcome, "passed")

    def test_invalid_world_size(self) -> None:
        with mock.patch.object(Threads, "world_size", 0):
            self.assertRegex(run(Things("passes")).message, "Things.world_size is 0; it must be a number of ranks")

    def test_names(self) -> None:
        self.assertEqual(Things("passes")._current_test_name, "passes")
        self.assertEqual(MultiThreadedTestCase().world_size, 4)
        self.assertEqual(Things.MAIN_THREAD_RANK, -1)
        with self.assertRaisesRegex(ValueError, "no such test method"):
            Things(methodName="none")


class TestHangs(ThreadsTest):
    def test_stacks_and_the_rank_that_lags_behind(self) -> None:
        seen = run(Things("hangs_in_one"), timeout=1.0)
        self.assertEqual(seen.outcome, "error")
        self.assertRegex(
            seen.message, r": rank 1 never reached .*; ranks 0, 2 are waiting in it; timed out after \d+\.\d s\n"
        )
        self.assertRegex(seen.message, r"rank 1: .* in hangs_in_one \(NEVER.wait\(\)\); last collective: barrier #1")
        self.assertIn("=> rank 1 never reached all_reduce #2", seen.message)
        for rank in range(3):
            self.assertRegex(seen.message, f"(?s)rank {rank}'s stacks, most recent call first:.*in hangs_in_one")
        self.assertNotIn("_testing/bases/threaded_ranks.py", seen.message)

    def test_the_next_test_is_not_disturbed(self) -> None:
        """Not even by a thread that outlives its own test."""
        run(Things("hangs_in_one"), timeout=1.0)
        stuck = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
        self.assertEqual([thread.name for thread in stuck], ["rank 1"], "the others waited for it in a collective")
        self.assertTrue(stuck[0].daemon)
        self.assertEqual(run(Things("passes")).outcome, "passed")
        NEVER.set()
        stuck[0].join()
        self.assertEqual(run(Things("passes")).outcome, "passed")

    def test_the_lock_of_dtensor_is_given_back(self) -> None:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        before = getattr(ShardingPropagator, "_fake_mode_lock", None)  # torch 2.11 has none
        self.assertEqual(run(Things("passes")).outcome, "passed")
        self.assertIs(getattr(ShardingPropagator, "_fake_mode_lock", None), before)

    def test_one_that_runs_python_is_ended(self) -> None:
        self.assertRegex(run(Things("spins_in_one"), timeout=0.3).message, "(?s)timed out .* rank 1: still running")
        self.assertEqual([thread for thread in threading.enumerate() if thread.name.startswith("rank ")], [])

    def test_a_failure_does_not_wait_for_the_deadline(self) -> None:
        with mock.patch.object(threaded_ranks, "GRACE_AFTER_FAILURE", 0.2):
            seen = run(Things("fails_while_another_hangs"))
        self.assertRegex(seen.message, "rank 2 of 3 failed: .*as told")
        self.assertRegex(seen.message, r"rank 1: still running after \d+\.\d+ s")
        self.assertRegex(seen.message, "(?s)rank 1's stacks, .*in fails_while_another_hangs")

    def test_one_deadline_for_all(self) -> None:
        class Decorated(TestCase):
            @spawn_threads_and_init_comms(timeout=0.3, world_size=4)
            def hangs(self) -> None:
                NEVER.wait()

        self.assertRegex(run(Decorated("hangs")).message, r"timed out after \d+\.\d s; all 4 ranks")


instantiate(TestOutcomes)
instantiate(TestThreadsThemselves)

if __name__ == "__main__":
    run_tests()
