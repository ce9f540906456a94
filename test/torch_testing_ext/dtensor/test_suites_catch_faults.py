"""Would the suites of tensor parallelism notice? Each fault here is put into the ranks, and a test of theirs must fail.

The faults are in PyTorch's part, where the suites stand for catching them, or in what a suite hands to it.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, input_reshard, loss

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

PARALLEL = Path(__file__).parents[2] / "distributed" / "tensor" / "parallel"


def load(name: str) -> ModuleType:
    """A suite, under a name of its own: its tests are not to be found, and run again, here."""
    spec = importlib.util.spec_from_file_location(f"faulty_{name}", PARALLEL / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tp = load("test_tp_examples")
ddp_2d = load("test_ddp_2d_parallel")


class InRanks:
    """Puts `fault` around the test, in each rank."""

    fault: Callable[[], AbstractContextManager[Any]]

    def run_test(self, name: str, pipe: Any) -> None:
        with type(self).fault():
            super().run_test(name, pipe)  # type: ignore[misc]


# -- faults


@contextmanager
def no_fault() -> Iterator[None]:
    yield


def output_is_not_reduced() -> AbstractContextManager[Any]:
    """A Rowwise layer hands out its partial sums."""
    return mock.patch.object(
        RowwiseParallel, "_prepare_output_fn", staticmethod(lambda layouts, local, module, out, mesh: out.to_local())
    )


def hidden_units_are_rolled() -> AbstractContextManager[Any]:
    """A Colwise layer hands out its features in another order."""
    prepare = ColwiseParallel._prepare_output_fn
    return mock.patch.object(
        ColwiseParallel,
        "_prepare_output_fn",
        staticmethod(lambda layouts, local, module, out, mesh: prepare(layouts, local, module, out, mesh).roll(1, -1)),
    )


def layer_is_gathered() -> AbstractContextManager[Any]:
    """The first layer's output is made whole for the second, which cuts it again: right, but for the communication."""

    class Gathering(tp.ColwiseParallel):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "output_layouts": Replicate()})

    class FromWhole(tp.RowwiseParallel):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "input_layouts": Replicate()})

    return mock.patch.multiple(tp, ColwiseParallel=Gathering, RowwiseParallel=FromWhole)


def restored_input_is_rolled() -> AbstractContextManager[Any]:
    """`input_reshard` puts the shards of the input together in the wrong order."""
    unpack = input_reshard._unpack_hook_tp  # type: ignore[attr-defined]
    return mock.patch.object(
        input_reshard, "_unpack_hook_tp", lambda mesh, dim, x: unpack(mesh, dim, x).roll(1, dims=0)
    )


def sequence_is_not_parallel() -> AbstractContextManager[Any]:
    parallelize = tp.Transformer.parallelize
    return mock.patch.object(
        tp.Transformer,
        "parallelize",
        staticmethod(lambda model, mesh, _, **options: parallelize(model, mesh, False, **options)),
    )


def heads_are_swapped() -> AbstractContextManager[Any]:
    """Rank 0 holds rank 1's part of a weight, and the other way round."""
    parallelize = tp.Transformer.parallelize

    def swap(model: Any, mesh: Any, *args: Any, **options: Any) -> Any:
        parallel = parallelize(model, mesh, *args, **options)
        local = parallel.layers[0].attention.wv.weight.to_local()
        parts = [torch.empty_like(local) for _ in range(mesh.size())]
        dist.all_gather(parts, local.detach())
        with torch.no_grad():
            local.copy_(parts[mesh.get_local_rank() ^ 1])
        return parallel

    return mock.patch.object(tp.Transformer, "parallelize", staticmethod(swap))


def frozen_parameters_are_trained() -> AbstractContextManager[Any]:
    return mock.patch.object(torch.nn.Parameter, "requires_grad_", lambda parameter, wanted=True: parameter)


def maximum_is_not_reduced() -> AbstractContextManager[Any]:
    """Each rank's cross entropy takes the largest logit of its own classes for the largest of all."""
    return mock.patch.object(loss.funcol, "all_reduce", lambda local, *args, **options: local.clone())


def gradients_are_not_averaged() -> AbstractContextManager[Any]:
    build = ddp_2d.two_d_model

    def unsynchronised(*args: Any, **options: Any) -> Any:
        two_d = build(*args, **options)
        two_d.ddp.require_backward_grad_sync = False
        return two_d

    return mock.patch.object(ddp_2d, "two_d_model", unsynchronised)


def bucket_views_are_ignored() -> AbstractContextManager[Any]:
    ddp = ddp_2d.DDP
    return mock.patch.object(
        ddp_2d, "DDP", lambda model, gradient_as_bucket_view=False, **options: ddp(model, **options)
    )


def optimizer_is_not_loaded() -> AbstractContextManager[Any]:
    load_all = ddp_2d.dcp.load
    return mock.patch.object(
        ddp_2d.dcp, "load", lambda state, **options: load_all({"model": state["model"]}, **options)
    )


def nothing_is_stepped() -> AbstractContextManager[Any]:
    """The parallel model's optimizer, the second one made, does nothing."""
    made: list[Any] = []
    step = torch.optim.Adam.step

    def only_first(optim: Any, *args: Any) -> Any:
        if optim not in made:
            made.append(optim)
        return step(optim, *args) if optim is made[0] else None

    return mock.patch.object(torch.optim.Adam, "step", only_first)


# -- what must notice them


class Case(NamedTuple):
    suite: type
    fault: Callable[[], AbstractContextManager[Any]]
    test: str
    message: str  # a pattern of what the failing assertion says


MLP = "test_mlp_training_is_seq_parallel_{}_recompute_activation_{}".format
TRANSFORMER = "test_transformer_training_is_seq_parallel_{}_{}".format

CASES = [
    Case(tp.DistTensorParallelExampleTest, output_is_not_reduced, MLP(False, False), "not close|differ"),
    Case(tp.DistTensorParallelExampleTest, hidden_units_are_rolled, "test_mlp_inference", "not close|differ"),
    Case(tp.DistTensorParallelExampleTest, layer_is_gathered, MLP(False, False), "all_gather"),
    Case(tp.DistTensorParallelExampleTest, restored_input_is_rolled, MLP(False, True), "gradient of net1.weight"),
    Case(tp.DistTensorParallelExampleTest, sequence_is_not_parallel, TRANSFORMER(True, "float32"), "reduce_scatter"),
    Case(tp.DistTensorParallelExampleTest, heads_are_swapped, TRANSFORMER(False, "float64"), "not close|differ"),
    Case(tp.DistTensorParallelExampleTest, nothing_is_stepped, TRANSFORMER(False, "float32"), "parameter "),
    Case(
        tp.DistTensorParallelExampleTest,
        frozen_parameters_are_trained,
        "test_transformer_req_grad_seq_parallel_float32_thaw_norm__output",
        "x",
    ),
    Case(tp.DistTensorParallelExampleTest, maximum_is_not_reduced, "test_loss_parallel", "all_reduce"),
    Case(
        ddp_2d.Test2dParallelIntegration,
        output_is_not_reduced,
        "test_2d_ddp_integration_functionality",
        "not close|differ",
    ),
    Case(
        ddp_2d.Test2dParallelIntegration,
        gradients_are_not_averaged,
        "test_2d_ddp_integration_functionality",
        "gradient of net",
    ),
    Case(
        ddp_2d.Test2dParallelIntegration,
        nothing_is_stepped,
        "test_2d_ddp_integration_functionality",
        "net1.weight, rank",
    ),
    Case(
        ddp_2d.Test2dParallelIntegration, bucket_views_are_ignored, "test_2d_ddp_gradient_as_bucket_view", "one bucket"
    ),
    Case(ddp_2d.Test2dParallelIntegration, optimizer_is_not_loaded, "test_2d_ddp_save_and_load_dp_1", "exp_avg"),
]
SOUND = [
    Case(tp.DistTensorParallelExampleTest, no_fault, MLP(True, True), ""),
    Case(ddp_2d.Test2dParallelIntegration, no_fault, "test_2d_ddp_save_and_load_dp_4", ""),
]


class Faulty:
    """Holds the suites with their faults: out of a test loader's sight, but to be found by ranks."""


def faulty(case: Case) -> type:
    name = f"{case.suite.__name__}_{case.fault.__name__}"
    if not hasattr(Faulty, name):
        body = {"fault": staticmethod(case.fault), "__module__": __name__, "__qualname__": f"Faulty.{name}"}
        setattr(Faulty, name, type(name, (InRanks, case.suite), body))
    return getattr(Faulty, name)


for each in (*CASES, *SOUND):
    faulty(each)  # now, so that it is there in ranks that import this file anew


def case_name(case: Case) -> str:
    return f"{case.fault.__name__}_in_{case.test.removeprefix('test_')}"


class SuitesCatchFaultsTest(TestCase):
    @parametrize("case", CASES, name_fn=case_name)
    def test_fails(self, case: Case) -> None:
        result = unittest.TestResult()
        faulty(case)(case.test).run(result)
        self.assertEqual(result.errors, [])
        self.assertEqual(len(result.failures), 1, f"{case.test} passed with the fault")
        self.assertRegex(result.failures[0][1], case.message)

    @parametrize("case", SOUND, name_fn=case_name)
    def test_passes(self, case: Case) -> None:
        # Or a test with a fault might fail for the way it is run here.
        result = unittest.TestResult()
        faulty(case)(case.test).run(result)
        self.assertTrue(result.wasSuccessful(), str(result.failures + result.errors))
        self.assertEqual(result.skipped, [])


instantiate_parametrized_tests(SuitesCatchFaultsTest)

if __name__ == "__main__":
    run_tests()
