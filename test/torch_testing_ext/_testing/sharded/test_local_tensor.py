"""The same tests in ranks and on local tensors, in one process."""

from __future__ import annotations

import os
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_testing_ext import launch
from torch_testing_ext._process import fork_safety
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    create_local_tensor_test_class,
    map_local_for_rank,
    map_local_tensor_for_rank,
    reduce_local_int,
    skip_unless_torch_gpu,
    with_comms,
)


class EitherWayTest(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 4

    @with_comms
    def test_shards_and_back(self) -> None:
        mesh = self.build_device_mesh()
        x = torch.arange(8.0, device=self.device_type)
        placed = distribute_tensor(x, mesh, [Shard(0)])
        self.assertEqual(placed.redistribute(mesh, [Replicate()]).to_local(), x)

    @with_comms
    @parametrize("dim", [0, 1])
    def test_gradient(self, dim: int) -> None:
        x = torch.rand(4, 8, device=self.device_type)
        placed = distribute_tensor(x, self.build_device_mesh(), [Shard(dim)]).requires_grad_()
        (placed * placed).sum().backward()
        self.assertEqual(placed.grad.full_tensor(), 2 * x)

    @with_comms
    def test_by_rank(self) -> None:
        self.init_manual_seed_for_rank()
        local = map_local_for_rank(self.rank, lambda rank: torch.full((2,), float(rank)))
        full = DTensor.from_local(local, self.build_device_mesh(), [Shard(0)]).full_tensor()
        self.assertEqual(full.tolist(), [0, 0, 1, 1, 2, 2, 3, 3])
        doubled = map_local_tensor_for_rank(local, self.rank, lambda tensor, rank: tensor + rank)
        full = DTensor.from_local(doubled, self.build_device_mesh(), [Shard(0)]).full_tensor()
        self.assertEqual(full.tolist(), [0, 0, 2, 2, 4, 4, 6, 6])

    @with_comms
    def test_fails(self) -> None:
        self.fail("as it should")

    @with_comms
    @skip_unless_torch_gpu
    def test_needs_devices(self) -> None: ...

    @with_comms
    def test_only_in_ranks(self) -> None:
        self.assertFalse(self.is_local_tensor_enabled)


class Hidden:
    """Hides the classes from test loaders; LocalTensorTest runs their tests."""

    InstantiatedAfter: Any = instantiate_parametrized_tests(create_local_tensor_test_class(EitherWayTest))
    EitherWayTest = instantiate_parametrized_tests(EitherWayTest)
    OnLocalTensors: Any = create_local_tensor_test_class(EitherWayTest, ["test_only_in_ranks"])


EitherWayTest.__qualname__ = "Hidden.EitherWayTest"
del EitherWayTest

PASS = ["test_shards_and_back", "test_gradient_dim_0", "test_gradient_dim_1", "test_by_rank"]


def in_a_child(function: Any, *args: Any) -> str:
    """Call a function that returns text, in a forked process: if torch is built for CUDA, a backward leaves threads,
    which prevent later forks."""
    fork_safety.prepare_to_fork()
    reading, writing = os.pipe()
    pid = fork_safety.fork()
    if pid == 0:
        try:
            os.write(writing, function(*args).encode())
        except BaseException as error:
            os.write(writing, f"raised {error!r}".encode())
        finally:
            launch.close()  # no atexit handler will run to remove its files
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


class LocalTensorTest(TestCase):
    def outcome(self, cls: Any, test: str) -> str:
        return self.outcome_here(cls, test) if cls is Hidden.EitherWayTest else in_a_child(self.outcome_here, cls, test)

    def outcome_here(self, cls: Any, test: str) -> str:
        result = unittest.TestResult()
        cls(test).run(result)
        self.assertFalse(dist.is_initialized())
        named = {"failure": result.failures, "error": result.errors, "skip": result.skipped}
        return "; ".join(f"{kind}: {text}" for kind, found in named.items() for _, text in found) or "pass"

    @parametrize("test", PASS)
    def test_passes_either_way(self, test: str) -> None:
        self.assertEqual(
            [self.outcome(cls, test) for cls in (Hidden.EitherWayTest, Hidden.OnLocalTensors)], ["pass"] * 2
        )

    def test_failure_is_one(self) -> None:
        self.assertRegex(self.outcome(Hidden.OnLocalTensors, "test_fails"), "(?s)^failure: .*as it should")

    def test_skips(self) -> None:
        self.assertRegex(self.outcome(Hidden.OnLocalTensors, "test_needs_devices"), "^skip: .*at least 4")
        self.assertRegex(self.outcome(Hidden.OnLocalTensors, "test_only_in_ranks"), "^skip: .*local tensors")
        self.assertEqual(self.outcome(Hidden.EitherWayTest, "test_only_in_ranks"), "pass")

    def test_name(self) -> None:
        self.assertEqual(Hidden.OnLocalTensors.__name__, "EitherWayTestWithLocalTensor")

    def test_integers_by_rank(self) -> None:
        test = Hidden.OnLocalTensors("test_fails")
        self.assertEqual(reduce_local_int(test.rank, dict), {0: 0, 1: 1, 2: 2, 3: 3})
        self.assertEqual(reduce_local_int(test.rank, lambda by_rank: max(by_rank.values())), 3)


instantiate_parametrized_tests(LocalTensorTest)

if __name__ == "__main__":
    run_tests()
