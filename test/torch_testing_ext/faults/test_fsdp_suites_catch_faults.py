"""The suites of FSDP with tensor parallelism catch faults: with each fault, one of their tests fails and says why."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit import faults
from kit.faults import Case, SuiteFaultsTestCase, case_name, load
from torch.distributed.fsdp import _init_utils
from torch.distributed.tensor.parallel import RowwiseParallel

from torch_testing_ext._torch import fsdp_parts
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

fsdp1 = load("fsdp/test_fsdp_tp_integration.py")
fsdp2 = load("properties/test_fully_shard_tp_integration.py")


# -- faults


def output_is_not_reduced() -> AbstractContextManager[Any]:
    """A Rowwise layer does not reduce its output; each rank returns its rows of its own partial sums."""

    def unreduced(layouts: Any, local: Any, module: Any, output: Any, mesh: Any) -> torch.Tensor:
        return output.to_local().chunk(mesh.size(), dim=0)[mesh.get_local_rank()]

    return mock.patch.object(RowwiseParallel, "_prepare_output_fn", staticmethod(unreduced))


def gradients_are_not_averaged() -> AbstractContextManager[Any]:
    """FSDP keeps a rank's own shard of its own gradients."""

    def keep_own(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next(arg for arg in args if isinstance(arg, dist.ProcessGroup))
        output.copy_(input.chunk(group.size())[group.rank()])

    return mock.patch.object(dist, fsdp_parts.reduce_scatter_name(), keep_own)


def only_first_optimizer_steps() -> AbstractContextManager[Any]:
    """Of two models in a rank, the second is not trained."""
    stepping: list[Any] = []
    step = torch.optim.SGD.step

    def only_first(optimizer: Any, *args: Any) -> Any:
        if not stepping:
            stepping.append(optimizer)
        return step(optimizer, *args) if optimizer is stepping[0] else None

    return mock.patch.object(torch.optim, "SGD", type("SGD", (torch.optim.SGD,), {"step": only_first}))


def rate_times_ranks() -> AbstractContextManager[Any]:
    """The learning rate is multiplied by the number of ranks."""

    class Scaled(torch.optim.Adam):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr * (dist.get_world_size() if dist.is_initialized() else 1))

    return mock.patch.object(torch.optim, "Adam", Scaled)


def hidden_layer_is_gathered() -> AbstractContextManager[Any]:
    return faults.first_layer_is_gathered(fsdp1)


def module_state_is_not_broadcast() -> AbstractContextManager[Any]:
    return mock.patch.object(_init_utils, "_sync_params_and_buffers", lambda *args, **kwargs: None)


def norm_is_not_in_the_plan() -> AbstractContextManager[Any]:
    """Each tensor-parallel rank normalises its own rows, and the norm's gradients are not summed."""
    plan = {name: style for name, style in fsdp2.SEQUENCE_PARALLEL.items() if name != "norm"}
    return mock.patch.object(fsdp2, "SEQUENCE_PARALLEL", plan)


def blocks_stay_unsharded() -> AbstractContextManager[Any]:
    """Blocks are not resharded after the forward: the same numbers, and less communication."""
    fully_shard = fsdp2.fully_shard

    def keep_unsharded(module: Any, **options: Any) -> Any:
        return fully_shard(module, **{**options, "reshard_after_forward": False})

    return mock.patch.object(fsdp2, "fully_shard", keep_unsharded)


# -- the tests that must catch them


in_fsdp1 = functools.partial(Case, fsdp1.TestTPFSDPIntegration)
in_fsdp2 = functools.partial(Case, fsdp2.TestFullyShardTPIntegration)
in_training = functools.partial(Case, fsdp2.TestFullyShardTPTraining)
TRAINING = "test_fully_shard_tp_matches_single_device_is_sequence_parallel"
WITH_TENSORS = f"{TRAINING}_False_reshard_after_forward_True"
WITH_SEQUENCES = f"{TRAINING}_True_reshard_after_forward_True"

CASES = [
    in_fsdp1("test_fsdp_tp_integration", output_is_not_reduced, "output of rank"),
    in_fsdp1("test_fsdp_tp_integration", gradients_are_not_averaged, "gradient of net1.weight"),
    in_fsdp1("test_fsdp_tp_integration", only_first_optimizer_steps, "second output of rank"),
    in_fsdp1("test_fsdp_tp_extension_grad", hidden_layer_is_gathered, "all_gather_into_tensor"),
    in_fsdp1("test_fsdp_tp_sync_module_state", module_state_is_not_broadcast, "(param|buf) after"),
    in_training(WITH_TENSORS, gradients_are_not_averaged, "own samples alone.* a reduction over dp is missing"),
    in_training(WITH_SEQUENCES, norm_is_not_in_the_plan, r"gradient of 1.norm.*reduction\s+over\s+tp\s+is\s+missing"),
    in_training(WITH_TENSORS, rate_times_ranks, r"after the step.*4\s+times.*the\s+learning\s+rate"),
    in_fsdp2("test_fully_shard_tp_collectives", blocks_stay_unsharded, "_allgather_base_"),
]
SOUND = [
    in_fsdp1("test_fsdp_tp_extension_grad"),
    in_fsdp2("test_fully_shard_tp_collectives"),
]


class Faulty(faults.FaultySuites, cases=[*CASES, *SOUND]):
    pass


class FSDPSuitesCatchFaultsTest(SuiteFaultsTestCase):
    @parametrize("case", CASES, name_fn=case_name)
    def test_fails(self, case: Case) -> None:
        self.assert_caught(Faulty, case)

    @parametrize("case", SOUND, name_fn=case_name)
    def test_passes(self, case: Case) -> None:
        self.assert_sound(Faulty, case)


instantiate_parametrized_tests(FSDPSuitesCatchFaultsTest)

if __name__ == "__main__":
    run_tests()
