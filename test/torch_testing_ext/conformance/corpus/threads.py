"""MultiThreadedTestCase and spawn_threads_and_init_comms."""

import os
import random
import sys
import threading
import unittest
from typing import ClassVar

import torch
import torch.distributed as dist
from notes import note
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
    spawn_threads_and_init_comms,
)
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

STRICTER = {
    "AttributesTest.test_cpp_stacktraces": ("C++ raises an exception", "passed"),
    "SkipsTest.test_rank_1_alone": ("one thread skips or calls `sys.exit(3)`, the others pass", "failed"),
    "ExitsTest.test_sys_exit_3": ("one thread skips or calls `sys.exit(3)`, the others pass", "error"),
    "ExitsTest.test_rank_1_sys_exit_3": ("one thread skips or calls `sys.exit(3)`, the others pass", "error"),
    "ExitsTest.test_sys_exit_0": ("one thread skips or calls `sys.exit(3)`, the others pass", "error"),
    "NotSpawnedTest.test_no_threads": ("`setUp` starts no rank", "error"),
    "TearDownRaisesTest.test_passes": ("a thread raises in `perThreadSetUp`, `perThreadTearDown`", "error"),
    "CleanupsTest.test_cleanup_raises": ("a cleanup of the test method fails in a rank", "error"),
}
NEWER = {
    "HooksTest.test_fails": "2.13",
    "HooksTest.test_passes": "2.13",
    "HooksTest.test_skips": "2.13",
}


class Threads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()


class HooksTest(MultiThreadedTestCase):
    world_size = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        note(cls, "setUpClass")

    @classmethod
    def tearDownClass(cls):
        note(cls, "tearDownClass")
        super().tearDownClass()

    def setUp(self):
        note(self, "setUp")
        super().setUp()
        self.addCleanup(note, self, "cleanup")
        self._spawn_threads()

    def tearDown(self):
        note(self, "tearDown")
        super().tearDown()
        note(self, self.threads)

    def perThreadSetUp(self):
        note(self, "perThreadSetUp", dist.is_initialized())
        super().perThreadSetUp()

    def perThreadTearDown(self):
        note(self, "perThreadTearDown", dist.is_initialized())
        super().perThreadTearDown()

    def test_passes(self):
        note(self, "body")

    def test_fails(self):
        note(self, "body")
        raise ValueError("in all threads")

    def test_skips(self):
        note(self, "body")
        self.skipTest("in all threads")


class AttributesTest(Threads):
    def test_rank(self):
        note(self, self.rank, self.world_size, self.MAIN_THREAD_RANK)

    def test_name(self):
        note(self, self._current_test_name, self._testMethodName, self.id().rpartition(".")[2])

    def test_not_the_main_thread(self):
        note(self, threading.current_thread() is threading.main_thread())

    def test_own_instances(self):
        self.mark = self.rank
        dist.barrier()
        note(self, self.mark)

    def test_group(self):
        note(self, dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend())

    def test_precision(self):
        note(self, self.precision, self.rel_tol)

    def test_cpp_stacktraces(self):
        note(self, os.environ.get("TORCH_SHOW_CPP_STACKTRACES"))

    def test_grad(self):
        note(self, torch.is_grad_enabled(), torch.get_default_dtype())

    def test_nothing_of_set_up(self):
        note(self, len(self.threads) if hasattr(self, "threads") else "none")

    def test_on_rank(self):
        self.assertEqualOnRank(self.rank, 1, rank=1)
        self.assertNotEqualOnRank(self.rank, 5, rank=0)

    def test_on_rank_fails(self):
        self.assertEqualOnRank(self.rank, 5, rank=1)

    def test_equal_on_rank_0_by_default(self):
        self.assertEqualOnRank(self.rank, 0)


class MainThreadTest(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        note(self, self.rank, self.threads, dist.is_initialized())
        self._spawn_threads()
        note(self, len(self.threads), self.world_size)

    def test_seen(self):
        pass


class CollectivesTest(Threads):
    def test_all_reduce(self):
        tensor = torch.tensor([self.rank + 1.0])
        dist.all_reduce(tensor)
        note(self, tensor.tolist())

    def test_all_reduce_max(self):
        tensor = torch.tensor([self.rank])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        note(self, tensor.tolist())

    def test_broadcast(self):
        tensor = torch.tensor([self.rank])
        dist.broadcast(tensor, src=1)
        note(self, tensor.tolist())

    def test_all_gather(self):
        out = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(out, torch.tensor([self.rank]))
        note(self, [one.item() for one in out])

    def test_all_gather_into_tensor(self):
        out = torch.zeros(2)
        dist.all_gather_into_tensor(out, torch.tensor([float(self.rank)]))
        note(self, out.tolist())

    def test_reduce_scatter(self):
        out = torch.zeros(1)
        dist.reduce_scatter_tensor(out, torch.tensor([1.0, 2.0]))
        note(self, out.tolist())

    def test_scatter(self):
        out = torch.zeros(1)
        dist.scatter(out, [torch.tensor([3.0]), torch.tensor([4.0])] if self.rank == 0 else None, src=0)
        note(self, out.tolist())

    def test_all_to_all(self):
        out = [torch.zeros(1), torch.zeros(1)]
        dist.all_to_all(out, [torch.tensor([self.rank * 10.0]), torch.tensor([self.rank * 10.0 + 1])])
        note(self, [one.item() for one in out])

    def test_all_gather_object(self):
        out = [None, None]
        dist.all_gather_object(out, f"rank {self.rank}")
        note(self, out)

    def test_broadcast_object(self):
        out = [{"from": self.rank}]
        dist.broadcast_object_list(out, src=1)
        note(self, out)

    def test_barrier(self):
        dist.barrier()
        note(self, "through")

    def test_sub_groups(self):
        groups = [dist.new_group([0]), dist.new_group([1])]
        tensor = torch.tensor([self.rank + 1])
        dist.all_reduce(tensor, group=groups[self.rank])
        note(self, tensor.item())

    def test_average(self):
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        note(self, tensor.item())


class FailuresTest(Threads):
    def test_rank_0_raises(self):
        if self.rank == 0:
            raise ValueError("rank 0 alone")

    def test_rank_1_raises(self):
        if self.rank == 1:
            raise ValueError("rank 1 alone")

    def test_assertion(self):
        self.assertEqual(self.rank, 7)

    def test_while_another_waits(self):
        if self.rank == 1:
            raise ValueError("while rank 0 waits")
        dist.barrier()

    @unittest.expectedFailure
    def test_expected(self):
        self.fail("as expected")

    @unittest.expectedFailure
    def test_unexpected(self):
        pass


class SkipsTest(Threads):
    def test_all(self):
        self.skipTest("all threads")

    def test_rank_1_alone(self):
        if self.rank == 1:
            self.skipTest("rank 1 alone")

    def test_skip_and_failure(self):
        if self.rank == 0:
            raise ValueError("rank 0")
        self.skipTest("rank 1")

    @skip_if_lt_x_gpu(2)
    def test_two_gpus(self):
        note(self, "body")

    @unittest.skip("by unittest")
    def test_unittest(self):
        note(self, "body")


class ExitsTest(Threads):
    def test_skip_code(self):
        sys.exit(TEST_SKIPS["small_worldsize"].exit_code)

    def test_sys_exit_3(self):
        sys.exit(3)

    def test_sys_exit_0(self):
        sys.exit(0)

    def test_rank_1_sys_exit_3(self):
        if self.rank == 1:
            sys.exit(3)


class SetUpTest(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        if self._testMethodName == "test_skips":
            self.skipTest("in setUp")
        raise ValueError("in setUp")

    def test_skips(self):
        pass

    def test_raises(self):
        pass


class NotSpawnedTest(MultiThreadedTestCase):
    def test_no_threads(self):
        note(self, "body")


class TearDownRaisesTest(Threads):
    def perThreadTearDown(self):
        raise ValueError("in perThreadTearDown")

    def test_passes(self):
        pass


class SubtestsTest(Threads):
    def test_passes(self):
        with self.subTest(number=1):
            note(self, "inner")

    def test_fails(self):
        with self.subTest(number=1):
            self.fail("inner")


class CleanupsTest(Threads):
    def test_cleanup_raises(self):
        self.addCleanup(self.raises)

    def raises(self):
        raise ValueError("in a cleanup")


class OverridesTest(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    @classmethod
    def _run(cls, test_name, rank, world_size, **kwargs):
        self = cls(test_name)
        self.rank = rank
        note(self, "own _run", world_size)
        self.run_test_with_threaded_pg(test_name, rank, world_size)

    def run_test_with_threaded_pg(self, test_name, rank, world_size):
        note(self, "own run_test_with_threaded_pg")
        super().run_test_with_threaded_pg(test_name, rank, world_size)

    @classmethod
    def _check_return_codes(cls, failed_ranks, timeout, fn):
        failed_ranks = [one for one in failed_ranks if not isinstance(one[1][1], KeyError)]
        super()._check_return_codes(failed_ranks, timeout, fn)

    def test_passes(self):
        note(self, "body")

    def test_forgiven(self):
        raise KeyError("forgiven")

    def test_not_forgiven(self):
        raise ValueError("not forgiven")


class ParametrizedTest(Threads):
    @parametrize("value", [1, "two", None, True, 2.5])
    def test_values(self, value):
        note(self, repr(value))


instantiate_parametrized_tests(ParametrizedTest)


class SharedStateTest(Threads):
    seen: ClassVar[list] = []

    def test_class_is_shared(self):
        self.seen.append(self.rank)
        dist.barrier()
        note(self, sorted(self.seen))

    def test_module_random(self):
        note(self, isinstance(random.random(), float))


class DecoratorTest(TestCase):
    @spawn_threads_and_init_comms(world_size=3)
    def test_world_size(self):
        assert dist.get_world_size() == 3
        with lock:
            ranks.add(dist.get_rank())

    def test_world_size_seen(self):
        self.assertEqual(ranks, {0, 1, 2})

    @spawn_threads_and_init_comms
    def test_bare(self):
        assert dist.get_world_size() == 4

    @spawn_threads_and_init_comms(world_size=2)
    def test_fails(self):
        raise ValueError("in the decorated")

    @spawn_threads_and_init_comms(world_size=2)
    def test_skips(self):
        self.skipTest("in the decorated")

    def test_no_group_afterwards(self):
        self.assertFalse(dist.is_initialized())

    @spawn_threads_and_init_comms(world_size=2)
    def test_collective(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


lock = threading.Lock()
ranks: set = set()

if __name__ == "__main__":
    run_tests()
