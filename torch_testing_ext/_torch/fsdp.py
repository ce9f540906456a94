"""FSDP, replicate, and the compiler under them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch


def cuda_spin(milliseconds: float) -> None:
    """Make the current CUDA stream wait for about so long, without holding up the host. `torch.cuda._sleep`: all."""

    torch.cuda._sleep(int(milliseconds * _cuda_cycles_per_ms()))


@functools.cache
def _cuda_cycles_per_ms() -> float:

    cycles = 1_000_000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first round loads the kernel
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / begin.elapsed_time(end)


def has_triton() -> bool:
    """Can Triton compile for the present device? `torch.utils._triton`: all."""
    from torch.utils._triton import has_triton

    return has_triton()


def all_gather_name() -> str:
    """What FSDP calls to gather: `torch.distributed.all_gather_single` since 2.13, `all_gather_into_tensor` before."""
    import torch.distributed as dist

    return "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def reduce_scatter_name() -> str:
    """Likewise `reduce_scatter_single`, or `reduce_scatter_tensor`."""
    import torch.distributed as dist

    return "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def fsdp_param_group_module() -> ModuleType:
    """Where FSDP2 keeps FSDPParamGroup, RegisterPostBackwardFunction, foreach_all_gather and foreach_reduce: 2.7 on."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group


@contextlib.contextmanager
def fsdp_reshard_preceded_by(action: Callable[[], None]) -> Iterator[None]:
    """While this lasts, FSDP1 calls `action` each time before it frees unsharded parameters.

    `torch.distributed.fsdp._runtime_utils._reshard`: all.
    """
    from torch.distributed.fsdp import _runtime_utils

    reshard = _runtime_utils._reshard

    def after_action(*args: Any, **kwargs: Any) -> Any:
        action()
        return reshard(*args, **kwargs)

    with mock.patch.object(_runtime_utils, "_reshard", after_action):
        yield


def fsdp_is_idle(model: Any) -> bool:
    """Is this FSDP1 module between steps? `TrainingState`: all."""
    from torch.distributed.fsdp._common_utils import TrainingState

    return model.training_state is TrainingState.IDLE


def fsdp_keeps_parameters_after_forward(model: Any) -> bool:
    """Does this FSDP1 module's sharding strategy leave parameters unsharded until the backward? All."""
    from torch.distributed.fsdp._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES

    return model.sharding_strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES


@contextlib.contextmanager
def fsdp_syncs_on_cpu() -> Iterator[None]:
    """While this lasts, FSDP1 takes `sync_module_states=True` for modules on the CPU too.

    It refuses them since NCCL could not broadcast their tensors; gloo can. The refusal is the function
    `_init_utils._check_module_states_for_sync_module_states`: all.
    """
    from torch.distributed.fsdp import _init_utils

    with mock.patch.object(_init_utils, "_check_module_states_for_sync_module_states", lambda states: None):
        yield


def compiled_autograd(compiler: Callable[[Any], Any], dynamic: bool = True) -> contextlib.AbstractContextManager[None]:
    """Backward passes inside this are captured as one graph and given to `compiler`.

    `torch._dynamo.compiled_autograd._enable`: all, instead of `enable` before 2.7.
    """
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(compiler, dynamic=dynamic)


def replicated_parameters(module: Any) -> dict[str, Any]:
    """The parameters that `replicate` reduces gradients of, by name, once the module has run.

    Where they were DTensors, `replicate` has put local tensors in their place, which `module.parameters()` does not
    show after a forward. `replicate.state(...)._param_list`, `_param_names`: all.
    """
    from torch.distributed._composable.replicate import replicate

    state = replicate.state(module)
    return dict(zip(state._param_names, state._param_list, strict=True))


def compiling_in_this_process() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, inductor compiles without worker processes. `torch._inductor.config.compile_threads`: all."""
    import torch._inductor.config

    return torch._inductor.config.patch(compile_threads=1)
