"""Private names of DTensor, FSDP and replicated models."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

# --------------------------------------------------------------------------------------------------------------------
# DTensor: its meshes and caches, special and local tensors, its shard order (since 2.10), its sharding rules.


def concatenate_meshes(meshes: list[Any]) -> Any:
    """Return one mesh with the dimensions of all `meshes`, which must have the same root mesh.

    `DeviceMesh._concatenate` since torch 2.10.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(meshes)


def is_functional_tensor(tensor: Any) -> bool:
    """Does it wrap another tensor for functionalization? `torch._is_functional_tensor`, all versions."""
    return torch._is_functional_tensor(tensor)


def is_local_tensor(tensor: Any) -> bool:
    """Is it a local tensor, which simulates all ranks? `torch.distributed._local_tensor.LocalTensor` since 2.9.

    None exists before that module is imported.
    """
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and isinstance(tensor, module.LocalTensor)


def forget_meshes() -> None:
    """Clear the caches of DTensor: they hold meshes whose process groups are about to be destroyed.

    `torch.distributed.tensor.debug._clear_sharding_prop_cache`, `_redistribute._gen_transform_infos`: 2.11 to 2.15.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # Torch does not annotate it, which only strict mypy reports.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call, unused-ignore]
    _redistribute._gen_transform_infos.cache_clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()


def forget_dtensor_rng() -> None:
    """Let the next random DTensor create a tracker for its own mesh. `_random._rng_tracker`, all versions."""
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:
        random._rng_tracker = None


def shard_order(mesh_dims_by_tensor_dim: Mapping[int, Sequence[int]]) -> tuple[Any, ...]:
    """Build a shard order: the mesh dimensions that cut each tensor dimension. `_dtensor_spec.ShardOrderEntry`."""
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    return tuple(
        ShardOrderEntry(tensor_dim=tensor_dim, mesh_dims=tuple(mesh_dims))
        for tensor_dim, mesh_dims in mesh_dims_by_tensor_dim.items()
    )


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a dim that later mesh dimensions have already cut into `split_factor` parts.

    `placement_types._StridedShard`: 2.5 to 2.15.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def redistribute_local(local: Any, before: Any, after: Any, use_graph_based_transform: bool) -> Any:
    """Redistribute this rank's part of a tensor. `_redistribute.redistribute_local_tensor`."""
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    return redistribute_local_tensor(local, before, after, use_graph_based_transform=use_graph_based_transform)


def take_placements_literally(spec: Any) -> None:
    """Stop a spec from reading strided shards as a shard order. `DTensorSpec`, at least until 2.15."""
    spec.use_strided_shard_as_shard_order = False
    spec.__post_init__()


_STRATEGY_TABLES = (
    "op_to_rules",
    "op_strategy_funcs",
    "op_to_schema_info",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info_for_single_dim_strategy",
)


@contextlib.contextmanager
def replaced_op_strategy(op: Any, strategy: Callable[..., Any], schema_info: Any) -> Iterator[None]:
    """Replace DTensor's sharding strategy for `op` for the length of a `with`.

    The propagator's tables, `_ops.utils.register_op_strategy` and `debug._clear_sharding_prop_cache`: seen on 2.13 and
    2.15.
    """
    from torch.distributed.tensor import DTensor, debug
    from torch.distributed.tensor._ops.utils import register_op_strategy

    clear_cache: Callable[[], None] = debug._clear_sharding_prop_cache
    # A rule of another kind would take precedence, so remove them all.
    propagator = vars(DTensor._op_dispatcher.sharding_propagator)
    tables: list[dict[Any, Any]] = [propagator[name] for name in _STRATEGY_TABLES if name in propagator]
    before = [table.pop(op, None) for table in tables]
    try:
        register_op_strategy(op, schema_info=schema_info)(strategy)
        clear_cache()
        yield
    finally:
        for table, entry in zip(tables, before, strict=True):
            table.pop(op, None)
            if entry is not None:
                table[op] = entry
        clear_cache()


# -- local tensors, which simulate all ranks in one process: `torch.distributed._local_tensor`, since 2.9


def local_tensor_mode(world_size: int) -> Any:
    """A context in which torch creates and handles local tensors of this many ranks. `LocalTensorMode`."""
    from torch.distributed._local_tensor import LocalTensorMode

    return LocalTensorMode(frozenset(range(world_size)))


def local_ranks(world_size: int) -> Any:
    """Return an integer whose value in each rank is that rank's number. `LocalIntNode`."""
    from torch.distributed._local_tensor import LocalIntNode

    sym_int: Any = torch.SymInt  # untyped in torch
    return sym_int(LocalIntNode({rank: rank for rank in range(world_size)}))


def local_ints(value: Any) -> dict[int, int]:
    """Return the value of a local integer in each rank. `LocalIntNode._local_ints`."""
    ints: dict[int, int] = value.node._local_ints
    return ints


def without_local_tensors() -> Any:
    """A context for work to do once and not for each rank. `maybe_disable_local_tensor_mode`."""
    from torch.distributed._local_tensor import maybe_disable_local_tensor_mode

    return maybe_disable_local_tensor_mode()


def for_each_local_rank(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run a function without side effects once for each rank of its local tensors.

    `maybe_run_for_local_tensor`.
    """
    from torch.distributed._local_tensor import maybe_run_for_local_tensor

    return maybe_run_for_local_tensor(func)


def record_autograd(enabled: bool) -> None:
    """Turn autograd's events for profilers on or off. `torch.autograd._enable_record_function`: 2.11 to 2.15."""
    autograd: Any = torch.autograd
    autograd._enable_record_function(enabled)


# --------------------------------------------------------------------------------------------------------------------
# FSDP, `replicate`, the compiler that they use, and the state dicts of sharded models.


def has_triton() -> bool:
    """Can Triton compile for the current device? `torch.utils._triton`: all."""
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
    from torch.distributed.fsdp import _runtime_utils

    reshard = _runtime_utils._reshard

    def after_action(*args: Any, **kwargs: Any) -> Any:
        action()
        return reshard(*args, **kwargs)

    with mock.patch.object(_runtime_utils, "_reshard", after_action):
        yield


def is_idle(model: Any) -> bool:
    """Is this FSDP1 module between steps? `TrainingState`: all."""
    from torch.distributed.fsdp._common_utils import TrainingState

    return model.training_state is TrainingState.IDLE


def keeps_parameters_after_forward(model: Any) -> bool:
    """Does this FSDP1 module's sharding strategy leave parameters unsharded until the backward? All."""
    from torch.distributed.fsdp._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES

    return model.sharding_strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES


def compiling_in_this_process() -> contextlib.AbstractContextManager[Any]:
    """A context in which inductor compiles without worker processes. `torch._inductor.config.compile_threads`: all."""
    import torch._inductor.config

    patch: contextlib.AbstractContextManager[Any] = torch._inductor.config.patch(compile_threads=1)
    return patch


# -- state dicts of sharded models: to compare them with those of unsharded ones, and to store them


def gather_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gather each sharded tensor. `torch.distributed._state_dict_utils._gather_state_dict`: 2.11 to 2.15."""
    from torch.distributed._state_dict_utils import _gather_state_dict

    return _gather_state_dict(state_dict)


def is_sharded(tensor: Any) -> bool:
    """Is it a DTensor, or one of the older sharded tensors? `_shard.sharded_tensor.ShardedTensor`: 2.11 to 2.15."""
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


# --------------------------------------------------------------------------------------------------------------------
# Tensors that torch keeps alike on all ranks of a group: those of a DDP model, and DTensors that are replicated.


class Replica(NamedTuple):
    """A tensor of this rank that the other members of a group hold, too. `is_buffer`: torch soon overwrites it."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool = False


def tensors_of_ddp(ddp: Any) -> list[Replica]:
    """The tensors of a DDP model that are alike when its optimizer steps.

    Left out are all if the ranks average them only now and then, and the statistics of a norm, which each rank has for
    itself between two forwards. `DistributedDataParallel._comm_hooks`: 2.11 to 2.15.
    """
    if any(type(state).__name__ == "PostLocalSGDState" for _, state in getattr(ddp, "_comm_hooks", ())):
        return []
    found = [Replica(name, _local(parameter)) for name, parameter in ddp.module.named_parameters()]
    for prefix, module in ddp.module.named_modules() if ddp.broadcast_buffers else ():
        if not hasattr(module, "track_running_stats"):
            buffers = module.named_buffers(prefix, recurse=False)
            found += [Replica(name, _local(buffer), is_buffer=True) for name, buffer in buffers]
    return [replica for replica in found if replica.name not in ddp.parameters_to_ignore]


def dtensors_of(optimizer: Any, names: Callable[[], Mapping[int, str]]) -> Iterator[tuple[Any, Replica]]:
    """The replicated DTensors that an optimizer steps, each with a group of its mesh.

    `names` returns names by `id`, for an optimizer that knows none.
    """
    tensor_module = sys.modules.get("torch.distributed.tensor")
    if tensor_module is None:
        return
    for parameter_group in optimizer.param_groups:
        given = parameter_group.get("param_names") or ()
        for at, one in enumerate(parameter_group["params"]):
            if isinstance(one, tensor_module.DTensor):
                name = given[at] if at < len(given) else names().get(id(one), f"parameter {at}")
                for dim, placement in enumerate(one.placements):
                    if placement.is_replicate() and one.device_mesh.size(dim) > 1:
                        yield one.device_mesh.get_group(dim), Replica(name, _local(one))


def _local(tensor: Any) -> torch.Tensor:
    """The part of this rank, without a trace in autograd."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return local


def names_around() -> dict[int, str]:
    """The names of parameters, by `id`, in the modules that the calling functions have at hand."""
    found: dict[int, str] = {}
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        local = frame.f_locals
        at_hand = [*local.values(), *getattr(local.get("self"), "__dict__", {}).values()]
        for module in at_hand:
            if issubclass(type(module), nn.Module):
                for name, one in module.named_parameters():
                    found.setdefault(id(one), name)
    return found
