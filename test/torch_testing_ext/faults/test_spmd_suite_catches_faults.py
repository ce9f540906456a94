"""The suite of the data-parallel compiler catches faults: with each fault, one of its tests fails and says why."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from kit import faults
from kit.faults import Case, SuiteFaultsTestCase, case_name, load

from torch_testing_ext._spmd import state_engine
from torch_testing_ext._spmd.gradient_buckets import GradientBucket, Wire
from torch_testing_ext._spmd.resting_state import RestingState
from torch_testing_ext._torch.tracing import local_tensor
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

suite = load("_spmd/test_data_parallel.py")


# -- faults


def nothing_is_broadcast() -> AbstractContextManager[Any]:
    """Each rank starts with its own weights and optimizer states."""
    return mock.patch.object(Wire, "broadcast", lambda *args: None)


def optimizer_keeps_the_state_of_its_rank() -> AbstractContextManager[Any]:
    return mock.patch.object(state_engine, "state_tensors", lambda optimizers: [])


def gradients_are_summed() -> AbstractContextManager[Any]:
    """Gradients are added over ranks, and not divided by their number."""

    def start(bucket: GradientBucket, wire: Wire, flag: bool, number: int = 0) -> None:
        bucket._fill(1.0)
        bucket._start(wire, flag, number)

    return mock.patch.object(GradientBucket, "start", start)


def gradients_stay_where_they_are() -> AbstractContextManager[Any]:
    """The means of gradients are computed, and nobody uses them."""
    return mock.patch.object(GradientBucket, "write_back", lambda *args: None)


def shards_are_stale() -> AbstractContextManager[Any]:
    """A step ends with the shards with which it began."""
    leave = RestingState._leave_param

    def leave_param(state: RestingState, managed: Any, rest: Any, grads: Any) -> Any:
        before = local_tensor(rest).clone()
        rest = leave(state, managed, rest, grads)
        local_tensor(rest).copy_(before)
        return rest

    return mock.patch.object(RestingState, "_leave_param", leave_param)


# -- the tests that must catch them

in_suite = functools.partial(Case, suite.TestDataParallel)

CASES = [
    in_suite("test_replicate_sgd", nothing_is_broadcast, r"loss of rank \d"),
    in_suite("test_fully_shard_sgd", nothing_is_broadcast, r"loss of rank \d"),
    in_suite("test_replicate_sgd", optimizer_keeps_the_state_of_its_rank, "net1.weight on rank 1, replicate"),
    in_suite("test_fully_shard_sgd", optimizer_keeps_the_state_of_its_rank, "net1.weight on rank ., fully_shard"),
    in_suite("test_replicate_sgd", gradients_are_summed, "net1.weight on rank ., replicate"),
    in_suite("test_fully_shard_sgd", gradients_stay_where_they_are, "net1.weight on rank ., fully_shard"),
    in_suite("test_replicate_adam_fused", gradients_stay_where_they_are, "net1.weight on rank ., replicate"),
    in_suite("test_data_parallel_batch_dim_analysis", gradients_are_summed, "net1.weight on rank ., replicate"),
    in_suite("test_fully_shard_sgd", shards_are_stale, "net1.weight on rank ., fully_shard"),
    in_suite("test_fully_shard_non_0_batch_dim", shards_are_stale, "net1.weight on rank ., fully_shard"),
]
SOUND = [in_suite("test_replicate_sgd"), in_suite("test_fully_shard_sgd")]


class Faulty(faults.FaultySuites, cases=[*CASES, *SOUND]):
    pass


class SPMDSuiteCatchesFaultsTest(SuiteFaultsTestCase):
    @parametrize("case", CASES, name_fn=case_name)
    def test_fails(self, case: Case) -> None:
        self.assert_caught(Faulty, case)

    @parametrize("case", SOUND, name_fn=case_name)
    def test_passes(self, case: Case) -> None:
        self.assert_sound(Faulty, case)


instantiate_parametrized_tests(SPMDSuiteCatchesFaultsTest)

if __name__ == "__main__":
    run_tests()
