"""Stand-ins for the harnesses of other projects: what their tests see in ranks, and that a failure is told."""

from __future__ import annotations

import contextlib
import functools
import os
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.ranks import (
    MultiProcessTestBase,
    Pool,
    debug_launcher,
    run_with_pet,
    run_with_pet_async,
    spawn,
    spawn_for_all_world_sizes,
)


def add_up(wanted: int) -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == wanted, "added up"


def add_up_here(wanted: int) -> None:
    dist.init_process_group("gloo")
    add_up(wanted)


class LaunchedByPetTest(unittest.TestCase):
    @run_with_pet(nproc=2)
    def test_function(self) -> None:
        add_up_here(2)

    @run_with_pet_async(nproc=2)
    async def test_coroutine(self) -> None:
        add_up_here(2)


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


def with_files(rank: int, world_size: int, file: str, other: str, wanted: int) -> None:
    assert not Path(other).exists()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
    add_up(world_size + wanted)


def add(rank: int, more: int, offset: int = 0) -> Any:
    add_up(2)
    return torch.tensor([rank + more + offset])


class StandInsTest(unittest.TestCase):
    def test_each_passes_and_fails(self) -> None:
        rows: dict[str, Any] = {
            "spawn": lambda right: spawn(lambda rank: add_up(right), 2, backend="gloo"),
            "debug_launcher": lambda right: debug_launcher(on_cpu, (right,), num_processes=2),
            "spawn_for_all_world_sizes": lambda right: spawn_for_all_world_sizes(with_files, [1, 2], (right - 2,)),
            "Pool": lambda right: Pool(2, initializer=add_up, initargs=(right,)).map(str, range(2)),
        }
        for name, call in rows.items():
            with self.subTest(name=name):
                call(2)
                with self.assertRaisesRegex(AssertionError, "added up"):
                    call(3)

    def test_world_sizes_by_default(self) -> None:
        for count, wanted in ((0, []), (3, [1, 2]), (8, [1, 2, 4, 8])):
            with (
                self.subTest(accelerators=count),
                mock.patch("torch_testing_ext._machine.accelerators.device_count", return_value=count),
                mock.patch("torch_testing_ext._testing.bases.functions_and_scripts._spawn") as started,
            ):
                with contextlib.nullcontext() if wanted else self.assertRaises(unittest.SkipTest):
                    spawn_for_all_world_sizes(with_files)
                self.assertEqual([call.args[1] for call in started.call_args_list], wanted)

    def test_results_of_a_pool(self) -> None:
        with Pool(processes=2) as pool:
            results = pool.starmap(functools.partial(add, offset=10), [(rank, 1) for rank in range(2)])
            self.assertEqual([result.item() for result in results], [11, 12])
            with self.assertRaisesRegex(ValueError, "3 calls for 2 ranks"):
                pool.map(str, range(3))

    def test_tests_of_torchsnapshot_and_torchrec(self) -> None:
        for cls in (LaunchedByPetTest, OfTorchrecTest):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(cls).run(result)
            self.assertEqual((result.errors, result.failures), ([], []))


if __name__ == "__main__":
    run_tests()
