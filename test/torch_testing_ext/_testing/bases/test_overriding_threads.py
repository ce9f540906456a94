"""What a class of ranks that are threads overrides wins, as with PyTorch's base."""

import queue
import sys
from typing import ClassVar

import torch.distributed as dist
from kit.outcomes import outcome_of

from torch_testing_ext.common_distributed import MultiThreadedTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.distributed.multi_threaded_pg import ProcessLocalGroup


class Threads(MultiThreadedTestCase):
    world_size = 2
    seen: ClassVar[list] = []

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def passes(self):
        self.seen.append(self.rank)
        dist.barrier()

    def fails_in_one(self):
        self.assertEqual(self.rank, 0)
        dist.barrier()

    def skips(self):
        self.skipTest("not today")

    @skip_if_lt_x_gpu(1000)
    def needs_devices(self): ...


class ThreadsLikePyTorch(Threads):
    """Overrides run_test_with_threaded_pg with what PyTorch's own does."""

    def run_test_with_threaded_pg(self, test_name, rank, world_size):
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=self.__class__.global_store)
        self.perThreadSetUp()
        try:
            getattr(self, test_name)()
        except BaseException as error:
            self.exception_queue.put((rank, sys.exc_info()))
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()
            self.perThreadTearDown()


class OwnGroup(Threads):
    @classmethod
    def _run(cls, test_name, rank, world_size, **kwargs):
        assert not dist.is_initialized(), "the group is made in run_test_with_threaded_pg"
        super()._run(test_name, rank, world_size, **kwargs)


class Hooks(Threads):
    def perThreadSetUp(self):
        self.seen.append(("up", dist.is_initialized()))

    def perThreadTearDown(self):
        self.seen.append(("down", dist.is_initialized()))


class SkipsInSetUp(Threads):
    def perThreadSetUp(self):
        self.skipTest("in set-up")


class JudgesThreads(Threads):
    @classmethod
    def _join_threads(cls, threads, fn):
        cls.seen.append((len(threads), fn.__name__))
        super()._join_threads(threads, fn)

    @classmethod
    def _check_return_codes(cls, failed_ranks, timeout, fn):
        ranks = sorted(rank for rank, (kind, error, tb) in failed_ranks if isinstance(error, AssertionError))
        cls.seen.append(ranks)
        super()._check_return_codes(failed_ranks, timeout, fn)


class Forgives(Threads):
    @classmethod
    def _check_return_codes(cls, failed_ranks, timeout, fn):
        others = [failed for failed in failed_ranks if not isinstance(failed[1][1], AssertionError)]
        super()._check_return_codes([f for f in others if "left alone" not in str(f[1][1])], timeout, fn)

    def raises_in_both(self):
        raise ValueError(self.rank)


class TestThreads(TestCase):
    def setUp(self):
        super().setUp()
        Threads.seen.clear()

    def test_a_copy_of_run_test(self):
        self.assertEqual(outcome_of(ThreadsLikePyTorch("passes")), ("passed", ""))
        self.assertEqual(outcome_of(ThreadsLikePyTorch("skips")), ("skipped", "not today"))
        self.assertRegex(outcome_of(ThreadsLikePyTorch("fails_in_one")).message, "rank 1 of 2 failed")
        self.assertTrue(MultiThreadedTestCase.exception_queue.empty())

    def test_left_in_the_queue_by_an_earlier_test(self):
        error = ValueError("old")
        MultiThreadedTestCase.exception_queue.put((0, (ValueError, error, None)))
        self.assertEqual(outcome_of(Threads("passes")), ("passed", ""))
        self.assertIsInstance(MultiThreadedTestCase.exception_queue, queue.Queue)

    def test_the_group_is_made_after_run(self):
        self.assertEqual(outcome_of(OwnGroup("passes")), ("passed", ""))

    def test_order_of_hooks(self):
        self.assertEqual(outcome_of(Hooks("skips")).outcome, "skipped")
        self.assertEqual(sorted(Threads.seen), [("down", False)] * 2 + [("up", True)] * 2)

    def test_set_up_decides_about_skips(self):
        self.assertEqual(outcome_of(SkipsInSetUp("needs_devices")), ("skipped", "in set-up"))
        self.assertIn("at least 1000", outcome_of(Threads("needs_devices")).message)

    def test_failures_are_judged_by_an_override(self):
        seen = outcome_of(JudgesThreads("fails_in_one"))
        self.assertRegex(seen.message, "rank 1 of 2 failed")
        self.assertEqual(Threads.seen, [(2, "fails_in_one"), [1]])
        self.assertEqual(outcome_of(Forgives("fails_in_one")), ("passed", ""))
        seen = outcome_of(Forgives("raises_in_both"))
        self.assertRegex(seen.message, r"RuntimeError|RankFailure: rank 0:\n(.|\n)*ValueError: 0(.|\n)*ValueError: 1")


if __name__ == "__main__":
    run_tests()
