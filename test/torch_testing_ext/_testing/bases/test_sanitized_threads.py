"""Ranks that are threads under the sanitizer: poison and delays, kinds by decorator, and what is not checked."""

import contextlib
import io
import os
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from kit.outcomes import AccountsResult

from torch_testing_ext._collectives.sanitizer import operation_checks
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import not_of_threads, read_kinds
from torch_testing_ext._tests import notes
from torch_testing_ext.common_distributed import (
    MultiThreadedTestCase,
    sanitize,
    spawn_threads_and_init_comms,
)
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import user_warnings
from torch_testing_ext.runner.events import RunBegan
from torch_testing_ext.runner.report.console import opening

WORLD_SIZE = 2


def ones():
    return torch.ones(4)


class Threads(MultiThreadedTestCase):
    """Subclasses of no loader: the methods have no `test` in their names."""

    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    @sanitize("poison")
    def outputs_that_nobody_writes(self):
        """Rank 0 is left alone in each collective."""
        if self.rank == 1:
            return
        outputs = [torch.zeros(4), torch.zeros(4)]
        with self.assertRaisesRegex(RuntimeError, "left alone"):
            dist.all_gather(outputs, ones())
        mine = torch.zeros(4)
        with self.assertRaisesRegex(RuntimeError, "left alone"):
            dist.broadcast(mine, 1)
        self.assertTrue(all(tensor.isnan().all() for tensor in (*outputs, mine)))

    @sanitize("poison")
    def outputs_that_are_inputs(self):
        whole = torch.arange(4.0)
        dist.all_gather_into_tensor(whole, whole[2 * self.rank :][:2])
        self.assertEqual(whole, torch.arange(4.0))
        mine = torch.full((4,), float(self.rank))
        dist.broadcast(mine, 1)
        self.assertEqual(mine, ones())
        dist.all_reduce(mine)
        self.assertEqual(mine, 2 * ones())

    @sanitize()
    def delayed(self):
        for _ in range(20):
            dist.barrier()
        self.assertEqual(self.rank, 0)

    @sanitize("races")
    def work_that_is_waited_for(self):
        mine = ones()
        whole = torch.zeros(4 * WORLD_SIZE + 4)
        works = [dist.all_reduce(mine, async_op=True) for _ in range(2)]  # the second writes before the first's wait
        works.append(dist.all_gather_into_tensor(whole[:-4], ones(), async_op=True))
        whole[-4:].add_(1)
        for work in works:
            work.wait()
        mine.add_(1)
        self.assertEqual(whole.sum().item(), 4 * WORLD_SIZE + 4)
        dist.all_reduce(ones(), async_op=True).get_future().wait()
        root = ones()
        work = dist.broadcast(root, 0, async_op=True)
        if self.rank == 0:
            root.sum()  # reads only
        work.wait()
        group = dist.group.WORLD
        gathered = torch.zeros(2, WORLD_SIZE)
        mine = torch.ones(2, 1)
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for row in range(2):
                dist.all_gather_into_tensor(gathered[row], mine[row], group=group)
        manager.wait()
        self.assertEqual(gathered, torch.ones(2, WORLD_SIZE))
        dist.barrier()

    @sanitize("races")
    def functional(self):
        import torch.distributed._functional_collectives as functional

        self.assertEqual(functional.all_reduce(ones(), "sum", dist.group.WORLD) + 0, WORLD_SIZE * ones())

    @sanitize("waits")
    def several_faults(self):
        whole = torch.zeros(4 * WORLD_SIZE)
        work = dist.all_gather_into_tensor(whole, ones(), async_op=True)
        whole[1] = 5  # a part of an output whose parts gloo copies
        work.wait()
        if self.rank == 1:
            self.kept = dist.broadcast(ones(), 0, async_op=True)
        else:
            dist.broadcast(ones(), 0)

    @sanitize("races")
    def input_that_is_written(self):
        mine = ones()
        work = dist.all_gather([torch.empty(4) for _ in range(WORLD_SIZE)], mine, async_op=True)
        mine.add_(1)
        work.wait()


class Decorated(unittest.TestCase):
    @sanitize("nan")
    @spawn_threads_and_init_comms(world_size=WORLD_SIZE)
    def nan_enters(self):
        dist.all_reduce(torch.full((4,), float("nan")))


class SanitizedThreadsTest(unittest.TestCase):
    def run_one(self, test):
        result, said = AccountsResult(), io.StringIO()
        user_warnings.say_once.cache_clear()
        with contextlib.redirect_stderr(said):
            test.run(result)
        return [text for _, text in result.errors + result.failures], said.getvalue()

    def test_poison(self):
        for name in ("outputs_that_nobody_writes", "outputs_that_are_inputs"):
            with self.subTest(name):
                failures, said = self.run_one(Threads(name))
                self.assertEqual(failures, [])
                self.assertNotIn("torch_testing_ext:", said)

    def test_work_that_is_waited_for(self):
        for name in ("work_that_is_waited_for", "functional"):
            with self.subTest(name):
                failures, said = self.run_one(Threads(name))
                self.assertEqual(failures, [])
                self.assertNotIn("torch_testing_ext:", said)

    def test_work_and_its_buffers(self):
        failures, _ = self.run_one(Threads("several_faults"))
        self.assertRegex(
            failures[0], r"rank 0: a buffer of all_gather \[4\] float32 was written before wait\(\) \(test_"
        )
        self.assertIn("rank 1: nobody waited for the work of broadcast [4] float32", failures[0])
        self.assertNotIn("rank 0: nobody waited", failures[0])
        failures, _ = self.run_one(Threads("input_that_is_written"))
        self.assertIn("a buffer of all_gather [4] float32 was written by aten.add_.Tensor before wait()", failures[0])

    def test_waits_are_no_longer_watched(self):
        wait = vars(dist.Work)["wait"]
        self.run_one(Threads("several_faults"))
        self.assertIs(vars(dist.Work)["wait"], wait)

    def test_delays(self):
        delays = []
        with (
            mock.patch.dict(os.environ, {"TORCH_TESTING_EXT_DELAYS": "5", "TORCH_TESTING_EXT_SANITIZE": "calls,hash"}),
            mock.patch.object(operation_checks.Delays, "sleep", delays.append),
        ):
            failures, said = self.run_one(Threads("delayed"))
        self.assertGreater(len(delays), 2)
        self.assertIn("Collectives were delayed at random, with seed 5", failures[0])
        self.assertEqual(said.count("ranks that are threads are not checked for: hash\n"), 1, said)

    def test_the_header_of_a_run_says_what_is_left_out(self):
        with (
            mock.patch.dict(os.environ, {"TORCH_TESTING_EXT_SANITIZE": "calls,hash"}),
            mock.patch.object(notes, "has_header", True),
        ):
            _, said = self.run_one(Threads("several_faults"))
        self.assertNotIn("ranks that are threads", said)
        run = RunBegan((), (), (), 1, 0.0, note=not_of_threads(read_kinds("all")))
        _, note = opening(run).splitlines()
        self.assertEqual(note, "ranks that are threads are not checked for: replicas")

    def test_a_function_in_threads(self):
        failures, _ = self.run_one(Decorated("nan_enters"))
        self.assertEqual(len(failures), 1)
        self.assertIn("4 NaN of 4 elements enter all_reduce", failures[0])


if __name__ == "__main__":
    run_tests()
