"""Stand-ins for the harnesses of other projects: what their tests see in ranks, and that a failure is told."""

from __future__ import annotations

import functools
import os
import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.compat.accelerate import debug_launcher
from torch_testing_ext.compat.torch_multiprocessing import Pool, mp_spawn
from torch_testing_ext.compat.torchrec import MultiProcessTestBase
from torch_testing_ext.ranks import spawn


def add_up(wanted: int) -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == wanted, "added up"


def add_up_here(wanted: int) -> None:
    dist.init_process_group("gloo")
    add_up(wanted)


class OfTorchrecTest(MultiProcessTestBase):
    def test_keywords(self) -> None:
        self._run_multi_process_test(callable=self._check, world_size=2, wanted=2)
        each = [{"wanted": rank} for rank in range(2)]
        self._run_multi_process_test_per_rank(callable=self._check_rank, world_size=2, kwargs_per_rank=each)

    @classmethod
    def _check(cls, rank: int, world_size: int, wanted: int) -> None:
        assert (rank, world_size) == (int(os.environ["RANK"]), 2)
        add_up_here(wanted)

    @classmethod
    def _check_rank(cls, rank: int, world_size: int, wanted: int) -> None:
        assert (rank, world_size) == (wanted, 2)


def on_cpu(wanted: int) -> None:
    assert os.environ["ACCELERATE_USE_CPU"] == "yes"
    add_up(wanted)


def in_group(rank: int, wanted: int) -> None:
    add_up_here(wanted)


def add(rank: int, more: int, offset: int = 0) -> Any:
    add_up(2)
    return torch.tensor([rank + more + offset])


class StandInsTest(unittest.TestCase):
    @pytest.mark.slow
    def test_each_passes_and_fails(self) -> None:
        rows: dict[str, Any] = {
            "spawn": lambda right: spawn(lambda rank: add_up(right), 2, backend="gloo"),
            "debug_launcher": lambda right: debug_launcher(on_cpu, (right,), num_processes=2),
            "mp_spawn": lambda right: mp_spawn(in_group, (right,), nprocs=2),
            "Pool": lambda right: Pool(2, initializer=add_up, initargs=(right,)).map(str, range(2)),
        }
        for name, call in rows.items():
            with self.subTest(name=name):
                call(2)
                with self.assertRaisesRegex(AssertionError, "added up"):
                    call(3)

    def test_results_of_a_pool(self) -> None:
        with Pool(processes=2) as pool:
            results = pool.starmap(functools.partial(add, offset=10), [(rank, 1) for rank in range(2)])
            self.assertEqual([result.item() for result in results], [11, 12])
            with self.assertRaisesRegex(ValueError, "3 calls for 2 ranks"):
                pool.map(str, range(3))

    def test_tests_of_torchrec(self) -> None:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(OfTorchrecTest).run(result)
        self.assertEqual((result.testsRun, result.errors, result.failures), (1, [], []))

    def test_spawn_of_torch_must_wait(self) -> None:
        with self.assertRaisesRegex(ValueError, "join=False"):
            mp_spawn(in_group, (2,), nprocs=2, join=False)


if __name__ == "__main__":
    run_tests()
