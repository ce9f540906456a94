"""Would the suite of `replicate` with the compiler notice? Each fault here is put into the ranks, and one of its tests
must fail, and say what is wrong.

Most faults show without inductor, on a small net: only those in the buckets need the code that it generates.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed._functional_collectives as functional_collectives
from torch._inductor.fx_passes import ddp_fusion
from torch.distributed.tensor.parallel import RowwiseParallel

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

FILE = Path(__file__).parents[2] / "distributed" / "_composable" / "test_replicate_with_compiler.py"


def load() -> ModuleType:
    """The suite, under a name of its own: its tests are not to be found, and run again, here."""
    spec = importlib.util.spec_from_file_location("faulty_test_replicate_with_compiler", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


suite = load()
Fault = Callable[[], AbstractContextManager[Any]]


# -- faults


@contextmanager
def no_fault() -> Iterator[None]:
    yield


def gradients_are_not_reduced() -> AbstractContextManager[Any]:
    """The hooks that the compiler traces leave out their all-reduce."""
    return changed_reduction(lambda tensor, op, group: tensor.clone())


def gradients_are_not_averaged() -> AbstractContextManager[Any]:
    """They are summed over ranks, and not divided by their number."""
    all_reduce = functional_collectives.all_reduce
    return changed_reduction(lambda tensor, op, group: all_reduce(tensor * group.size(), op, group))


def changed_reduction(change: Callable) -> AbstractContextManager[Any]:
    """DDP's hooks give three arguments by position; DTensor's all-reduces, which stay as they are, do not."""
    all_reduce = functional_collectives.all_reduce

    def reduce(*args: Any, **kwargs: Any) -> Any:
        return change(*args) if len(args) == 3 else all_reduce(*args, **kwargs)

    return mock.patch.object(functional_collectives, "all_reduce", reduce)


def gradients_are_always_reduced() -> AbstractContextManager[Any]:
    """As if there were no `no_sync`."""
    return mock.patch.object(suite.Training, "_gradient_sync", lambda training, sync: nullcontext())


def compiled_models_always_reduce() -> AbstractContextManager[Any]:
    """The eager one keeps its gradients to itself, the compiled ones do not."""
    wanted = suite.Training._gradient_sync

    def ignored(training: Any, sync: bool) -> AbstractContextManager[Any]:
        return wanted(training, sync or training.name != "eager replicate")

    return mock.patch.object(suite.Training, "_gradient_sync", ignored)


def backward_is_not_compiled() -> AbstractContextManager[Any]:
    return mock.patch.object(suite, "compile_backward", lambda **options: nullcontext())


def buckets_are_not_made() -> AbstractContextManager[Any]:
    return mock.patch.object(ddp_fusion, "fuse_ddp_with_concat_op", lambda graph: None)


def waits_are_not_delayed() -> AbstractContextManager[Any]:
    return mock.patch.object(ddp_fusion, "schedule_comm_wait", lambda graph: None)


def partial_sums_are_given_out() -> AbstractContextManager[Any]:
    """A Rowwise layer does not reduce its output."""

    def unreduced(layouts: Any, local: Any, module: Any, output: Any, mesh: Any) -> torch.Tensor:
        return output.to_local()

    return mock.patch.object(RowwiseParallel, "_prepare_output_fn", staticmethod(unreduced))


# -- what must notice them


class Case(NamedTuple):
    suite: str
    test: str
    fault: Fault
    message: str  # a pattern of what the failing assertion says
    inductor: bool = False


REPLICATE = "ReplicateTest"
CASES = [
    Case(REPLICATE, "test_compile_backward_only_on_cpu", gradients_are_not_reduced, "gradient of .* in compiled repl"),
    Case(REPLICATE, "test_compile_gpu_on_cpu", gradients_are_not_averaged, "gradient of .* in compiled replicate"),
    Case(REPLICATE, "test_compile_cpu_no_sync", gradients_are_always_reduced, "ranks 0 and 1, iteration 0"),
    Case(REPLICATE, "test_compile_cpu_no_sync", compiled_models_always_reduce, "in compiled replicate, iteration 0"),
    Case(REPLICATE, "test_compile_gpu_on_cpu", backward_is_not_compiled, "no backward was compiled"),
    Case(REPLICATE, "test_bucketing_concat_op", buckets_are_not_made, "Expected 3 but got 0", inductor=True),
    Case(REPLICATE, "test_bucketing_concat_op", waits_are_not_delayed, "Expected to not find .*wait", inductor=True),
    Case("DDP_TP_Test", "test_ddp_tp", gradients_are_not_reduced, "eager and compiled"),
    Case("DDP_TP_Test", "test_ddp_tp", partial_sums_are_given_out, "one device and compiled"),
]
SOUND = [Case(REPLICATE, "test_compile_cpu_no_sync", no_fault, "")]


class InRanks:
    """Puts `fault` around the test, in each rank."""

    fault: Fault
    inductor: bool

    def run_test(self, test_name: str, pipe: Any) -> None:
        smaller = nullcontext() if self.inductor else mock.patch.multiple(suite, DIM=8, BACKEND="aot_eager")
        with smaller, type(self).fault():
            super().run_test(test_name, pipe)  # type: ignore[misc]


class Faulty:
    """Holds the suites with their faults: out of a test loader's sight, but to be found by ranks."""


def faulty(case: Case) -> Any:
    name = f"{case.suite}_{case.fault.__name__}"
    if not hasattr(Faulty, name):
        body = {"fault": staticmethod(case.fault), "inductor": case.inductor}
        names = {"__module__": __name__, "__qualname__": f"Faulty.{name}"}
        setattr(Faulty, name, type(name, (InRanks, getattr(suite, case.suite)), {**body, **names}))
    return getattr(Faulty, name)


for each in (*CASES, *SOUND):
    faulty(each)  # now, so that it is there in ranks that import this file anew


def case_name(case: Case) -> str:
    return f"{case.fault.__name__}_in_{case.test.removeprefix('test_')}"


class ReplicateSuiteCatchesFaultsTest(TestCase):
    @parametrize("case", CASES, name_fn=case_name)
    def test_fails(self, case: Case) -> None:
        result = unittest.TestResult()
        faulty(case)(case.test).run(result)
        texts = [text for _, text in result.failures + result.errors]  # FileCheck raises RuntimeError
        self.assertEqual(len(texts), 1, f"{case.test} passed with the fault")
        self.assertRegex(texts[0], case.message)

    @parametrize("case", SOUND, name_fn=case_name)
    def test_passes(self, case: Case) -> None:
        # Or a test with a fault might fail for the way it is run here.
        result = unittest.TestResult()
        faulty(case)(case.test).run(result)
        self.assertEqual([text for _, text in result.errors + result.failures], [])
        self.assertEqual(result.skipped, [])


instantiate_parametrized_tests(ReplicateSuiteCatchesFaultsTest)

if __name__ == "__main__":
    run_tests()
