"""The suite of the data-parallel compiler catches faults: with each fault, one of its tests fails and says why."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from kit import faults
from kit.faults import Case, SuiteFaultsTestCase, case_name, load

from torch_testing_ext._spmd import step_engine
from torch_testing_ext._spmd.buckets import Bucket
from torch_testing_ext._spmd.layout import Rows
from torch_testing_ext._spmd.row_updates import _OnRows
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

suite = load("_spmd/test_data_parallel.py")


# -- faults


def nothing_is_broadcast() -> AbstractContextManager[Any]:
    """Each rank starts with its own weights and optimizer states."""
    return mock.patch.object(step_engine, "broadcast", lambda *args: None)


def optimizer_keeps_the_state_of_its_rank() -> AbstractContextManager[Any]:
    return mock.patch.object(step_engine, "state_tensors", lambda optimizers: [])


def gradients_are_summed() -> AbstractContextManager[Any]:
    """Gradients are added over ranks, and not divided by their number."""
    finish = Bucket.finish

    def finish_and_multiply(bucket: Bucket) -> bool:
        flag = finish(bucket)
        bucket.flat.mul_(2)
        return flag

    return mock.patch.object(Bucket, "finish", finish_and_multiply)


def gradients_stay_where_they_are() -> AbstractContextManager[Any]:
    """The means of gradients are computed, and nobody uses them."""
    return mock.patch.object(Bucket, "write_back", lambda *args: None)


def gradients_are_lost() -> AbstractContextManager[Any]:
    """Each rank sends zeros instead of its gradients."""
    start = Bucket.start

    def start_with_zeros(bucket: Bucket, *args: Any) -> None:
        for param in bucket.params:
            if param.grad is not None:
                param.grad = param.grad * 0
        start(bucket, *args)

    return mock.patch.object(Bucket, "start", start_with_zeros)


def rows_are_those_of_rank_0() -> AbstractContextManager[Any]:
    return mock.patch.object(Rows, "of", lambda rows, whole: whole[: rows.chunk])


def updates_are_lost() -> AbstractContextManager[Any]:
    """The optimizer updates a copy of the rows."""
    enter = _OnRows.enter

    def enter_with_a_copy(rows: _OnRows) -> None:
        enter(rows)
        rows.pair.plain.data = rows.pair.plain.data.clone()

    return mock.patch.object(_OnRows, "enter", enter_with_a_copy)


# -- the tests that must catch them

in_suite = functools.partial(Case, suite.TestDataParallel)

CASES = [
    in_suite("test_replicate_sgd", nothing_is_broadcast, r"loss of rank \d"),
    in_suite("test_replicate_sgd", optimizer_keeps_the_state_of_its_rank, "net1.weight on rank 1, replicate"),
    in_suite("test_replicate_sgd", gradients_are_summed, "net1.weight on rank ., replicate"),
    in_suite("test_fully_shard_sgd", gradients_are_lost, "net1.weight on rank ., fully_shard"),
    in_suite("test_replicate_adam_fused", gradients_stay_where_they_are, "net1.weight on rank ., replicate"),
    in_suite("test_data_parallel_batch_dim_analysis", gradients_are_summed, "net1.weight on rank ., replicate"),
    in_suite("test_fully_shard_sgd", rows_are_those_of_rank_0, "net1.weight on rank ., fully_shard"),
    in_suite("test_fully_shard_non_0_batch_dim", updates_are_lost, "net1.weight on rank ., fully_shard"),
]
# The step itself notices these.
REFUSED = [
    in_suite("test_fully_shard_sgd", nothing_is_broadcast, "The parameters of rank 1 differ"),
    in_suite("test_fully_shard_sgd", optimizer_keeps_the_state_of_its_rank, "The parameters of rank 1 differ"),
]
SOUND = [in_suite("test_replicate_sgd"), in_suite("test_fully_shard_sgd")]


class Faulty(faults.FaultySuites, cases=[*CASES, *REFUSED, *SOUND]):
    pass


class SPMDSuiteCatchesFaultsTest(SuiteFaultsTestCase):
    @parametrize("case", CASES, name_fn=case_name)
    def test_fails(self, case: Case) -> None:
        self.assert_caught(Faulty, case)

    @parametrize("case", REFUSED, name_fn=case_name)
    def test_is_refused(self, case: Case) -> None:
        self.assert_caught(Faulty, case, errors_too=True)

    @parametrize("case", SOUND, name_fn=case_name)
    def test_passes(self, case: Case) -> None:
        self.assert_sound(Faulty, case)


instantiate_parametrized_tests(SPMDSuiteCatchesFaultsTest)

if __name__ == "__main__":
    run_tests()
