"""The suites of tensor parallelism catch faults: with each fault, one of their tests fails and says why.

The faults are in PyTorch, or in what a suite passes to it.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit import faults
from kit.faults import Case, SuiteFaultsTestCase, case_name, load, output_is_not_reduced
from torch.distributed.tensor.parallel import ColwiseParallel, input_reshard, loss

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

tp = load("tensor/parallel/test_tp_examples.py")
ddp_2d = load("tensor/parallel/test_ddp_2d_parallel.py")


# -- faults


def hidden_units_are_rolled() -> AbstractContextManager[Any]:
    """A Colwise layer returns its features in another order."""
    prepare = ColwiseParallel._prepare_output_fn
    return mock.patch.object(
        ColwiseParallel,
        "_prepare_output_fn",
        staticmethod(lambda layouts, local, module, out, mesh: prepare(layouts, local, module, out, mesh).roll(1, -1)),
    )


def layer_is_gathered() -> AbstractContextManager[Any]:
    return faults.first_layer_is_gathered(tp)


def restored_input_is_rolled() -> AbstractContextManager[Any]:
    """`input_reshard` joins the shards of the input in the wrong order."""
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
    """Ranks 0 and 1, and ranks 2 and 3, hold each other's shards of a weight."""
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
    """Each rank's cross entropy uses the largest logit of its own classes as the largest of all."""
    return mock.patch.object(loss.funcol, "all_reduce", lambda local, *args, **options: local.clone())


def gradients_are_not_averaged() -> AbstractContextManager[Any]:
    build = ddp_2d.init_model

    def unsynchronised(*args: Any, **options: Any) -> Any:
        model, two_d, group = build(*args, **options)
        two_d.require_backward_grad_sync = False
        return model, two_d, group

    return mock.patch.object(ddp_2d, "init_model", unsynchronised)


def bucket_views_are_ignored() -> AbstractContextManager[Any]:
    two_d = ddp_2d.TwoDParallel
    return mock.patch.object(
        ddp_2d, "TwoDParallel", lambda *words, gradient_as_bucket_view=False, **options: two_d(*words, **options)
    )


def optimizer_is_not_loaded() -> AbstractContextManager[Any]:
    load_all = ddp_2d.dcp.load
    return mock.patch.object(
        ddp_2d.dcp, "load", lambda state, **options: load_all({"model": state["model"]}, **options)
    )


def only_first_optimizer_steps() -> AbstractContextManager[Any]:
    """The parallel model's optimizer, which steps second, does nothing."""
    stepped: list[Any] = []
    step = torch.optim.Adam.step

    def only_first(optim: Any, *args: Any) -> Any:
        if optim not in stepped:
            stepped.append(optim)
        return step(optim, *args) if optim is stepped[0] else None

    return mock.patch.object(torch.optim.Adam, "step", only_first)


# -- the tests that must catch them

MLP = "test_mlp_training_is_seq_parallel_{}_recompute_activation_{}".format
TRANSFORMER = "test_transformer_training_is_seq_parallel_{}_{}".format

in_tp = functools.partial(Case, tp.DistTensorParallelExampleTest)
in_ddp_2d = functools.partial(Case, ddp_2d.Test2dParallelIntegration)

CASES = [
    in_tp(MLP(False, False), output_is_not_reduced, "not close|differ"),
    in_tp("test_mlp_inference", hidden_units_are_rolled, "not close|differ"),
    in_tp(MLP(False, False), layer_is_gathered, "all_gather"),
    in_tp(MLP(False, True), restored_input_is_rolled, "gradient of net1.weight"),
    in_tp(TRANSFORMER(True, "float32"), sequence_is_not_parallel, "reduce_scatter"),
    in_tp(TRANSFORMER(False, "float64"), heads_are_swapped, "not close|differ"),
    in_tp(TRANSFORMER(False, "float32"), only_first_optimizer_steps, "parameter "),
    in_tp("test_transformer_req_grad_seq_parallel_float32_thaw_norm__output", frozen_parameters_are_trained, "x"),
    in_tp("test_loss_parallel", maximum_is_not_reduced, "all_reduce"),
    in_ddp_2d("test_2d_ddp_integration_functionality", output_is_not_reduced, "not close|differ"),
    in_ddp_2d("test_2d_ddp_integration_functionality", gradients_are_not_averaged, "gradient of module.net"),
    in_ddp_2d("test_2d_ddp_integration_functionality", only_first_optimizer_steps, "net1.weight, rank"),
    in_ddp_2d("test_2d_ddp_gradient_as_bucket_view", bucket_views_are_ignored, "one bucket"),
    in_ddp_2d("test_2d_ddp_save_and_load_dp_1", optimizer_is_not_loaded, "exp_avg"),
]
SOUND = [
    in_tp(MLP(True, True)),
    in_ddp_2d("test_2d_ddp_save_and_load_dp_4"),
]


class Faulty(faults.FaultySuites, cases=[*CASES, *SOUND]):
    pass


class TPSuitesCatchFaultsTest(SuiteFaultsTestCase):
    @parametrize("case", CASES, name_fn=case_name)
    def test_fails(self, case: Case) -> None:
        self.assert_caught(Faulty, case)

    @parametrize("case", SOUND, name_fn=case_name)
    def test_passes(self, case: Case) -> None:
        self.assert_sound(Faulty, case)


instantiate_parametrized_tests(TPSuitesCatchFaultsTest)

if __name__ == "__main__":
    run_tests()
