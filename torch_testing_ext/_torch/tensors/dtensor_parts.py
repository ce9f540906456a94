"""DTensor: its meshes and caches, special and local tensors, its shard order (since 2.10), its sharding rules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def concatenate_meshes(meshes: list[Any]) -> Any:
    """Return one mesh with the dimensions of all `meshes`, which must have the same root mesh.

    `DeviceMesh._concatenate` since torch 2.10.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(meshes)


def is_functional_tensor(tensor: Any) -> bool:
    """Whether it wraps another tensor for functionalization. `torch._is_functional_tensor`, all versions."""
    return torch._is_functional_tensor(tensor)


def is_local_tensor(tensor: Any) -> bool:
    """Whether it is a local tensor, which simulates all ranks. `torch.distributed._local_tensor.LocalTensor` since 2.9.

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


def spec_of(dtensor: Any) -> Any:
    """Return the mesh, the placements and the shape of a DTensor. `DTensor._spec`: 2.11 to 2.15."""
    return dtensor._spec


def set_spec(dtensor: Any, spec: Any) -> None:
    """Let the local tensor of a DTensor be read by this spec from now on."""
    dtensor._spec = spec


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


def indices_of_local(dtensor: Any) -> list[torch.Tensor | None]:
    """For each dimension of a DTensor, which of its indices this rank holds; None for all of them.

    `Shard._split_tensor`, `_StridedShard`: 2.11 to 2.15.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    indices: list[torch.Tensor | None] = [None] * dtensor.dim()
    for at, placement in enumerate(dtensor.placements):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        held = indices[placement.dim]
        rows = torch.arange(dtensor.shape[placement.dim]) if held is None else held
        factor = getattr(placement, "split_factor", None)
        cut: Any = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
        parts, _ = cut._split_tensor(rows, dtensor.device_mesh.size(at), with_padding=False, contiguous=False)
        indices[placement.dim] = parts[dtensor.device_mesh.get_local_rank(at)]
    return indices
