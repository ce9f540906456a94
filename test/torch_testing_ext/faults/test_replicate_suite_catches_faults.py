"""The suite of `replicate` with the compiler catches faults: with each fault, one of its tests fails and says why.

Most show on a small net of two layers, without inductor. Only faults in the buckets need the code that inductor
generates, and only a fault in the output of a layer needs further layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from kit import faults
from kit.faults import Case, Fault, SuiteFaultsTestCase, case_name, load, output_is_not_reduced
from torch import nn
from torch._inductor.fx_passes import ddp_fusion

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

pytestmark = pytest.mark.nightly

suite = load("_composable/test_replicate_with_compiler.py")


# -- faults


def gradients_are_not_reduced() -> AbstractContextManager[Any]:
    """The hooks that the compiler traces skip their all-reduce."""
    return changed_reduction(lambda tensor, op, group: tensor.clone())


def gradients_are_not_averaged() -> AbstractContextManager[Any]:
    """Gradients are summed over ranks, but not divided by the number of ranks."""
    all_reduce = functional_collectives.all_reduce
    return changed_reduction(lambda tensor, op, group: all_reduce(tensor * group.size(), op, group))


def changed_reduction(change: Callable) -> AbstractContextManager[Any]:
    """Apply `change` in DDP's hooks only: they pass three positional arguments, and DTensor's all-reduces do not."""
    all_reduce = functional_collectives.all_reduce

    def reduce(*args: Any, **kwargs: Any) -> Any:
        return change(*args) if len(args) == 3 else all_reduce(*args, **kwargs)

    return mock.patch.object(functional_collectives, "all_reduce", reduce)


def gradients_are_always_reduced() -> AbstractContextManager[Any]:
    """`no_sync` has no effect."""
    return mock.patch.object(suite.ReplicateTest, "_gradient_sync", lambda test, model, sync: nullcontext())


def compiled_models_always_reduce() -> AbstractContextManager[Any]:
    """`no_sync` has an effect on the eager model only, not on the compiled ones."""
    wanted = suite.ReplicateTest._gradient_sync

    def ignored(test: Any, model: Any, sync: bool) -> AbstractContextManager[Any]:
        return wanted(test, model, sync or hasattr(model, "_orig_mod"))

    return mock.patch.object(suite.ReplicateTest, "_gradient_sync", ignored)


def backward_is_not_compiled() -> AbstractContextManager[Any]:
    return mock.patch.object(suite.compiled_autograd, "_enable", lambda *words, **options: nullcontext())


def buckets_are_not_made() -> AbstractContextManager[Any]:
    return mock.patch.object(ddp_fusion, "fuse_ddp_with_concat_op", lambda graph: None)


def waits_are_not_delayed() -> AbstractContextManager[Any]:
    return mock.patch.object(ddp_fusion, "schedule_comm_wait", lambda graph: None)


# -- the tests that must catch them


class TwoLayers(nn.Module):
    """The first half of the suite's net: two buckets, the first of which must not wait before the second is sent."""

    def __init__(self, checkpoint: bool = False) -> None:
        super().__init__()
        assert not checkpoint
        self.fc1 = nn.Linear(suite.DIM, suite.DIM)
        self.fc2 = nn.Linear(suite.DIM, suite.DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))


def on_two_layers(fault: Fault = nullcontext, **options: Any) -> Fault:
    return with_settings(fault, Net=TwoLayers, BUCKETS=2, **options)


def with_settings(fault: Fault, **options: Any) -> Fault:
    """The fault, in the suite with these globals."""

    @contextmanager
    def fault_with_settings() -> Iterator[None]:
        with mock.patch.multiple(suite, **options), fault():
            yield

    fault_with_settings.__name__ = fault.__name__
    return fault_with_settings


SMALL = {"DIM": 8, "BACKEND": "aot_eager"}
on_small_net = functools.partial(on_two_layers, **SMALL)


in_replicate = functools.partial(Case, suite.ReplicateTest)
in_ddp_tp = functools.partial(Case, suite.DDP_TP_Test)

CASES = [
    in_replicate(
        "test_compile_backward_only_on_cpu", on_small_net(gradients_are_not_reduced), "gradient of .* in compiled repl"
    ),
    in_replicate(
        "test_compile_gpu_on_cpu", on_small_net(gradients_are_not_averaged), "gradient of .* in compiled replicate"
    ),
    in_replicate("test_compile_cpu_no_sync", on_small_net(gradients_are_always_reduced), "ranks 0 and 1, iteration 0"),
    in_replicate(
        "test_compile_cpu_no_sync", on_small_net(compiled_models_always_reduce), "in compiled replicate, iteration 0"
    ),
    in_replicate("test_compile_gpu_on_cpu", on_small_net(backward_is_not_compiled), "no backward was compiled"),
    in_replicate("test_bucketing_concat_op", on_two_layers(buckets_are_not_made), "Expected 2 but got 0"),
    in_replicate("test_bucketing_concat_op", on_two_layers(waits_are_not_delayed), "Expected to not find .*wait"),
    in_ddp_tp("test_ddp_tp", on_small_net(gradients_are_not_reduced), "eager and compiled"),
    # The output of the second layer: that of the last has the same gradients whether it is reduced or not.
    in_ddp_tp("test_ddp_tp", with_settings(output_is_not_reduced, **SMALL), "one device and compiled"),
]
SOUND = [in_replicate("test_compile_cpu_no_sync", on_small_net())]


class Faulty(faults.FaultySuites, cases=[*CASES, *SOUND]):
    pass


class ReplicateSuiteCatchesFaultsTest(SuiteFaultsTestCase):
    @parametrize("case", CASES, name_fn=case_name)
    def test_fails(self, case: Case) -> None:
        self.assert_caught(Faulty, case, errors_too=True)

    @parametrize("case", SOUND, name_fn=case_name)
    def test_passes(self, case: Case) -> None:
        self.assert_sound(Faulty, case)


instantiate_parametrized_tests(ReplicateSuiteCatchesFaultsTest)

if __name__ == "__main__":
    run_tests()
