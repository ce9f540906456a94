"""FSDP, `replicate`, the compiler that they use, and the state dicts of sharded models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import nn

from torch_testing_ext._torch import replacing


def has_triton() -> bool:
    """Whether Triton can compile for the current device. `torch.utils._triton`: all."""
    from torch.utils._triton import has_triton

    return has_triton()


def all_gather_name() -> str:
    """Name FSDP's all-gather: `torch.distributed.all_gather_single` since 2.13, `all_gather_into_tensor` before."""
    import torch.distributed as dist

    return "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def reduce_scatter_name() -> str:
    """Name FSDP's reduce-scatter: `reduce_scatter_single` since 2.13, `reduce_scatter_tensor` before."""
    import torch.distributed as dist

    return "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def param_group_module() -> ModuleType:
    """Return FSDP2's module of FSDPParamGroup, RegisterPostBackwardFunction and the foreach_* functions: since 2.7."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group


@contextlib.contextmanager
def reshard_preceded_by(action: Callable[[], None]) -> Iterator[None]:
    """Within this context, FSDP1 calls `action` each time before it frees unsharded parameters.

    `torch.distributed.fsdp._runtime_utils._reshard`: all.
    """
    with replacing.replaced("parameters that FSDP frees", _preceded_by(action)):
        yield


def _preceded_by(action: Callable[[], None]) -> replacing.Make:
    def make(_: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            action()
            return function(*args, **kwargs)

        return call

    return make


@contextlib.contextmanager
def reduction_preceded_by(action: Callable[[], None]) -> Iterator[None]:
    """Within this context, FSDP calls `action` each time before it reduces gradients."""
    with replacing.replaced("reductions of FSDP", _preceded_by(action)):
        yield


def hybrid_strategies() -> tuple[Any, ...]:
    """Return FSDP1's strategies of sharding within nodes only. `_HYBRID_SHARD_ZERO2`: 2.11 to 2.15."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


def checkpoint_activations(module: nn.Module) -> None:
    """Let the backward compute a module's activations again. `torch.distributed._composable`: 2.11 to 2.15."""
    from torch.distributed._composable import checkpoint  # type: ignore[attr-defined, unused-ignore]

    checkpoint(module)


def is_idle(model: Any) -> bool:
    """Whether this FSDP1 module is between steps. `TrainingState`: all."""
    from torch.distributed.fsdp._common_utils import TrainingState

    return model.training_state is TrainingState.IDLE


def keeps_parameters_after_forward(model: Any) -> bool:
    """Whether this FSDP1 module's sharding strategy leaves parameters unsharded until the backward. All."""
    from torch.distributed.fsdp._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES

    return model.sharding_strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES


def compiling_in_this_process() -> contextlib.AbstractContextManager[Any]:
    """A context in which inductor compiles without worker processes. `torch._inductor.config.compile_threads`: all."""
    import torch._inductor.config

    patch: contextlib.AbstractContextManager[Any] = torch._inductor.config.patch(compile_threads=1)
    return patch


def gather_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gather each sharded tensor. `torch.distributed._state_dict_utils._gather_state_dict`: 2.11 to 2.15."""
    from torch.distributed._state_dict_utils import _gather_state_dict

    return _gather_state_dict(state_dict)


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor or an older sharded tensor. `_shard.sharded_tensor.ShardedTensor`: 2.11 to 2.15."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined, unused-ignore]
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, (DTensor, ShardedTensor))


def on_state_dict(module: nn.Module, saved: Any, loading: Any) -> None:
    """Call `saved(module, state_dict, prefix, local_metadata)` after saving the state of `module`, and
    `loading(module, state_dict, prefix, ...)` before loading it.

    `_register_state_dict_hook`, `_register_load_state_dict_pre_hook`: 2.11 to 2.15.
    """
    hooks: Any = module  # whose registration methods are untyped in torch
    hooks._register_state_dict_hook(saved)
    hooks._register_load_state_dict_pre_hook(loading, with_module=True)


def stream_extension_class() -> Any:
    """Return the base of extensions that change the bytes. `StreamTransformExtension`: 2.11 to 2.15."""
    from torch.distributed.checkpoint._extension import StreamTransformExtension

    return StreamTransformExtension


def new_extension_registry() -> Any:
    """Return a table of extensions with those of torch. `torch.distributed.checkpoint._extension`: 2.11 to 2.15."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    return ExtensionRegistry()
