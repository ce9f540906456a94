"""Would the suites of FSDP with tensor parallelism notice? Each fault here is put into the ranks, and a test of theirs
must fail, and say what is wrong."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import _init_utils
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from torch_testing_ext import _torch
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

FOLDER = Path(__file__).parents[2] / "distributed" / "fsdp"


def load(name: str) -> ModuleType:
    """A suite, under a name of its own: its tests are not to be found, and run again, here."""
    spec = importlib.util.spec_from_file_location(f"faulty_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fsdp1 = load("test_fsdp_tp_integration")
fsdp2 = load("test_fully_shard_tp_integration")

Fault = Callable[[], AbstractContextManager[Any]]


# -- faults


def partial_sums_are_given_out() -> AbstractContextManager[Any]:
    """A Rowwise layer does not reduce its output; each rank takes its rows of what it has itself."""

    def unreduced(layouts: Any, local: Any, module: Any, output: Any, mesh: Any) -> torch.Tensor:
        return output.to_local().chunk(mesh.size(), dim=0)[mesh.get_local_rank()]

    return mock.patch.object(RowwiseParallel, "_prepare_output_fn", staticmethod(unreduced))


def gradients_are_not_averaged() -> AbstractContextManager[Any]:
    """FSDP keeps its own part of its own gradients."""

    def keep_own(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next(arg for arg in args if isinstance(arg, dist.ProcessGroup))
        output.copy_(input.chunk(group.size())[group.rank()])

    return mock.patch.object(dist, _torch.reduce_scatter_name(), keep_own)


def first_optimizer_alone_steps() -> AbstractContextManager[Any]:
    stepping: list[Any] = []

    def only_first(step: Callable) -> Callable:
        def wrapped(optimizer: Any, *args: Any) -> Any:
            if not stepping:
                stepping.append(optimizer)
            return step(optimizer, *args) if optimizer is stepping[0] else None

        return wrapped

    return mock.patch.multiple(
        torch.optim, SGD=_with_step(torch.optim.SGD, only_first), Adam=_with_step(torch.optim.Adam, only_first)
    )


def _with_step(optimizer: type, change: Callable) -> type:
    return type(optimizer.__name__, (optimizer,), {"step": change(optimizer.step)})


def hidden_layer_is_gathered() -> AbstractContextManager[Any]:
    """The first layer's output is made whole, and cut again: the same numbers, but more communication."""
    plan = fsdp1.SEQUENCE_PARALLEL_PLAN
    plan["net1"].output_layouts = (Replicate(),)
    plan["net2"].input_layouts = (Replicate(),)
    return nullcontext()


def module_state_is_not_sent() -> AbstractContextManager[Any]:
    return mock.patch.object(_init_utils, "_sync_params_and_buffers", lambda *args, **kwargs: None)


def norm_is_not_in_the_plan() -> AbstractContextManager[Any]:
    """Each tensor-parallel rank normalises its own rows, and nobody adds up the norm's gradients."""
    plan = {name: style for name, style in fsdp2.SEQUENCE_PARALLEL.items() if name != "norm"}
    return mock.patch.object(fsdp2, "SEQUENCE_PARALLEL", plan)


def blocks_stay_unsharded() -> AbstractContextManager[Any]:
    """Blocks are not resharded after the forward: the same numbers, and less communication."""
    fully_shard = fsdp2.fully_shard

    def keep_whole(module: Any, **options: Any) -> Any:
        return fully_shard(module, **{**options, "reshard_after_forward": False})

    return mock.patch.object(fsdp2, "fully_shard", keep_whole)


# -- what must notice them


class Case(NamedTuple):
    suite: str
    test: str
    fault: Fault
    message: str  # a pattern of what the failing assertion says


# Not as names of this module, where a test loader would find them.
SUITES: dict[str, Any] = {"FSDP1": fsdp1.TestTPFSDPIntegration, "FSDP2": fsdp2.TestFullyShardTPIntegration}
PARITY = "test_fully_shard_tp_matches_fsdp1_tp_and_single_device"

CASES = [
    Case("FSDP1", "test_fsdp_tp_integration", partial_sums_are_given_out, "output of rank"),
    Case("FSDP1", "test_fsdp_tp_integration", gradients_are_not_averaged, "gradient of net1.weight"),
    Case("FSDP1", "test_fsdp_tp_integration", first_optimizer_alone_steps, "second output of rank"),
    Case("FSDP1", "test_fsdp_tp_extension_grad", hidden_layer_is_gathered, "all_gather_into_tensor"),
    Case("FSDP1", "test_fsdp_tp_sync_module_state", module_state_is_not_sent, "(param|buf) after"),
    Case("FSDP2", PARITY, gradients_are_not_averaged, "FSDP2 gradient of 0.up.weight"),
    Case("FSDP2", PARITY, norm_is_not_in_the_plan, "sequence_parallel=True.*gradient of 0.norm.weight"),
    Case("FSDP2", PARITY, first_optimizer_alone_steps, "FSDP2 0.up.weight after step 0"),
    Case("FSDP2", "test_fully_shard_tp_collectives", blocks_stay_unsharded, "_allgather_base_"),
]


class Faulty:
    """Holds the suites with their faults: out of a test loader's sight, but to be found by ranks."""


def faulty(suite: str, fault: Fault) -> Any:
    name = f"{suite}_{fault.__name__}"
    if not hasattr(Faulty, name):
        body = {"fault": staticmethod(fault), "__module__": __name__, "__qualname__": f"Faulty.{name}"}
        setattr(Faulty, name, type(name, (InRanks, SUITES[suite]), body))
    return getattr(Faulty, name)


class InRanks:
    """Puts `fault` around the test, in each rank."""

    fault: Fault

    def run_test(self, test_name: str, pipe: Any) -> None:
        with type(self).fault():
            super().run_test(test_name, pipe)  # type: ignore[misc]


for each in CASES:
    faulty(each.suite, each.fault)  # now, so that it is there in ranks that import this file anew


for each_suite in SUITES:
    faulty(each_suite, nullcontext)


class FSDPSuitesCatchFaultsTest(TestCase):
    @parametrize("case", CASES, name_fn=lambda case: f"{case.fault.__name__}_in_{case.suite}")
    def test_fails(self, case: Case) -> None:
        result = unittest.TestResult()
        faulty(case.suite, case.fault)(case.test).run(result)
        self.assertEqual([text for _, text in result.errors], [])
        self.assertEqual(len(result.failures), 1, f"{case.test} passed with the fault")
        self.assertRegex(result.failures[0][1], f"(?s){case.message}")

    @parametrize("suite,test", [("FSDP1", "test_fsdp_tp_extension_grad"), ("FSDP2", "test_fully_shard_tp_collectives")])
    def test_passes_without_fault(self, suite: str, test: str) -> None:
        # Or a test with a fault might fail for the way it is run here.
        result = unittest.TestResult()
        faulty(suite, nullcontext)(test).run(result)
        self.assertEqual([text for _, text in result.errors + result.failures], [])
        self.assertEqual(result.skipped, [])


instantiate_parametrized_tests(FSDPSuitesCatchFaultsTest)

if __name__ == "__main__":
    run_tests()
