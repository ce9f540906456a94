"""Placements in all ways, ordered shards, checks of sharding rules; imports DTensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from torch_testing_ext._torch.tensors import dtensor_parts

# --------------------------------------------------------------------------------------------------------------------
# DTensorConverter, which places the tensor arguments of a call on a mesh in all ways, and checks with it.

__unittest = True

# The arguments of a call, by position and by keyword.
_Arguments = tuple[tuple[object, ...], dict[str, object]]


class DTensorConverter:
    """Iterates over (args, kwargs) with their tensors distributed, once for every combination of placements.

    A tensor is replicated, or sharded over the whole mesh in a dimension that divides evenly. A tensor that cannot
    become a DTensor is left unchanged and counted in `miss`.
    """

    def __init__(
        self, mesh: DeviceMesh, args: tuple[object, ...], kwargs: dict[str, object], replicate_only: bool = False
    ) -> None:
        self.hit = 0
        self.miss = 0
        self.mesh = mesh
        self.args = args
        self.kwargs = kwargs
        self.replicate_only = replicate_only
        self._leaves, self._spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        choices = [self.gen_sharding_choices_for_arg(tensor) for tensor in tensors]
        self.sharding_combs: Iterator[Sequence[Placement]] = itertools.product(*choices)

    def successful(self) -> bool:
        """Were there tensors, and has each of them become a DTensor so far?"""
        return self.hit > 0 and self.miss == 0

    def is_supported_tensor(self, t: torch.Tensor) -> bool:
        unsupported = (
            t.is_sparse
            or t.layout is not torch.strided
            or t.is_quantized
            or t.is_nested
            or t.is_neg()
            or t.is_conj()
            or t.device.type in ("lazy", "meta")
            or dtensor_parts.is_functional_tensor(t)
        )
        return not unsupported

    def gen_sharding_choices_for_arg(self, arg: torch.Tensor) -> Sequence[Placement]:
        choices: list[Placement] = [Replicate()]
        # No collective takes a bool tensor, so its shards could not be gathered.
        if not self.replicate_only and arg.dtype is not torch.bool:
            ranks = self.mesh.size()
            for dim, size in enumerate(arg.shape):
                if size > 1 and size % ranks == 0:
                    choices.append(Shard(dim))
        return choices

    def __iter__(self) -> DTensorConverter:
        return self

    def __next__(self) -> _Arguments:
        placements = iter(next(self.sharding_combs))
        leaves: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = self.to_dist_tensor(leaf, self.mesh, [next(placements)])
            leaves.append(leaf)
        arguments: _Arguments = tree_unflatten(leaves, self._spec)
        return arguments

    def to_dist_tensor(self, t: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
        """Distribute a tensor; one that cannot become a DTensor stays as it is, and is counted."""
        # Untyped in torch.
        is_tensor_like: Any = torch.overrides.is_tensor_like
        if not is_tensor_like(t):
            raise RuntimeError(f"only a tensor can become a DTensor, not a {type(t).__name__}")
        # It is undefined what a DTensor of another subclass is, so those are left unchanged.
        plain = type(t) in (torch.Tensor, nn.Parameter) or dtensor_parts.is_local_tensor(t)
        if not plain or not self.is_supported_tensor(t):
            self.miss += 1
            return t
        self.hit += 1
        if t.ndim == 0:
            placements = [Replicate()] * mesh.ndim
        distributed = distribute_tensor(t, mesh, placements)
        if isinstance(t, nn.Parameter):
            return nn.Parameter(distributed, t.requires_grad)
        return distributed


# -- checks that compare an operation on DTensors with the same operation on full tensors


def check_all_placements(test: Any, mesh: DeviceMesh, op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    expected = op(*args, **kwargs)
    converter = DTensorConverter(mesh, args, kwargs)
    for dist_args, dist_kwargs in converter:
        leaves = tree_leaves((dist_args, dist_kwargs))
        placed = [leaf.placements for leaf in leaves if isinstance(leaf, DTensor)]
        where = f"with arguments placed as {placed}"
        test.assertTrue(converter.successful(), f"not every tensor argument could become a DTensor, {where}")
        result = op(*dist_args, **dist_kwargs).full_tensor()
        test.assertEqual(result, expected, msg=_after(where))


def check_dtensors(test: Any, op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    # Copies, since the operation may work in place.
    full_args, full_kwargs = tree_map_only(DTensor, _full_copy, (args, kwargs))
    expected = tree_leaves(op(*full_args, **full_kwargs))
    results = tree_leaves(op(*args, **kwargs))
    test.assertEqual([result.full_tensor() for result in results], expected)


def _full_copy(tensor: DTensor) -> torch.Tensor:
    return tensor.full_tensor().detach().clone()


def _after(text: str) -> Callable[[str], str]:
    return lambda difference: f"{difference}\n{text}"


# --------------------------------------------------------------------------------------------------------------------
# DTensors with a dimension that is sharded over several mesh dimensions in a chosen order.
#
# DTensor itself always goes from the first mesh dimension to the last. These helpers use its internals, in order to
# test them; forward only.

# Each entry: a tensor dimension, and the mesh dimensions that shard it, in order.
ShardOrder = tuple[Any, ...]


def generate_shard_orders(mesh: DeviceMesh, tensor_rank: int) -> Iterator[ShardOrder]:
    """Generate every order that uses all mesh dimensions: permute them, split them into runs, one per tensor dim."""
    for order in itertools.permutations(range(mesh.ndim)):
        for count in range(1, mesh.ndim + 1):
            for cuts in itertools.combinations(range(1, mesh.ndim), count - 1):
                runs = [order[start:end] for start, end in itertools.pairwise((0, *cuts, mesh.ndim))]
                for dims in itertools.combinations(range(tensor_rank), count):
                    yield dtensor_parts.shard_order(dict(zip(dims, runs, strict=True)))


def shard_order_to_placement(shard_order: ShardOrder | None, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of a shard order, which do not contain the order itself."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for entry in shard_order or ():
        for mesh_dim in entry.mesh_dims:
            placements[mesh_dim] = Shard(entry.tensor_dim)
    return tuple(placements)


def redistribute(
    dtensor_input: DTensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shard_order: ShardOrder | None,
    use_graph_based_transform: bool = True,
) -> DTensor:
    """Redistribute to these placements, or if None to those of the shard order, sharded in that order."""
    before = dtensor_input._spec
    after = deepcopy(before)
    if placements is None:
        placements = shard_order_to_placement(shard_order, device_mesh)
    after.placements = tuple(placements)
    after.shard_order = shard_order or ()
    if after == before:
        return dtensor_input
    local = dtensor_parts.redistribute_local(dtensor_input.to_local(), before, after, use_graph_based_transform)
    redistributed = DTensor.from_local(local, device_mesh)
    redistributed._spec = deepcopy(after)
    return redistributed


def patched_distribute_tensor(
    input_tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shard_order: ShardOrder | None,
    use_graph_based_transform: bool = True,
    src_data_rank: int | None = 0,
) -> DTensor:
    if placements is None:
        placements = shard_order_to_placement(shard_order, device_mesh)
    distributed = distribute_tensor(input_tensor, device_mesh, tuple(placements), src_data_rank=src_data_rank)
    dtensor_parts.take_placements_literally(distributed._spec)
    return redistribute(distributed, device_mesh, tuple(placements), shard_order, use_graph_based_transform)


def make_full_tensor(dtensor_input: DTensor) -> torch.Tensor:
    mesh = dtensor_input.device_mesh
    replicated = redistribute(dtensor_input, mesh, placements=None, shard_order=())
    return replicated.to_local()


# --------------------------------------------------------------------------------------------------------------------
# Checks of a sharding rule: they run a sample on local shards and compare the gathered result with the full one.

# Errors of DTensor for operations, or arguments of them, that it does not support.
_NOT_SUPPORTED = ("does not have a sharding strategy registered", "got mixed torch.Tensor and DTensor")


def validate_sharding_rule_sample(
    op: Callable[..., Any],
    full_args: tuple[Any, ...],
    full_kwargs: dict[str, Any],
    input_placements: Sequence[Placement],
    output_placements: Sequence[Placement],
    device_mesh: DeviceMesh,
) -> bool:
    """Does the operation on local shards of the inputs return local shards of the outputs?"""
    tensors = _tensors((full_args, full_kwargs))
    locals_ = []
    for tensor, placement in zip(tensors, input_placements, strict=False):
        placed = distribute_tensor(tensor, device_mesh, (placement,))
        locals_.append(placed.to_local())
    local_args, local_kwargs = _replaced((full_args, full_kwargs), locals_)
    expected = _tensors(op(*full_args, **full_kwargs))
    got = _tensors(op(*local_args, **local_kwargs))
    for whole, local, placement in zip(expected, got, output_placements, strict=False):
        placed = DTensor.from_local(local, device_mesh, (placement,))
        if not _close(placed.full_tensor(), whole, rtol=1e-5):
            return False
    return True


def validate_sharding_rule_sample_backward(
    op: Callable[..., Any],
    full_args: tuple[Any, ...],
    full_kwargs: dict[str, Any],
    input_placements: Sequence[Placement],
    device_mesh: DeviceMesh,
) -> bool | None:
    """Do DTensors with these placements get the gradients of full tensors? None if there is no gradient to compare."""
    tensors = _tensors((full_args, full_kwargs))
    if len(input_placements) != len(tensors):
        raise ValueError(f"{len(input_placements)} placements for {len(tensors)} tensors")
    whole = _fresh_leaves(tensors)
    try:
        if not _run_backward(op, _replaced((full_args, full_kwargs), whole)):
            return None
    except RuntimeError:
        return None
    fresh = zip(_fresh_leaves(tensors), input_placements, strict=True)
    placed = [distribute_tensor(tensor, device_mesh, (placement,)) for tensor, placement in fresh]
    try:
        if not _run_backward(op, _replaced((full_args, full_kwargs), placed)):
            return None
    except Exception as error:
        if any(text in str(error) for text in _NOT_SUPPORTED):
            return None
        raise
    for tensor, dtensor in zip(whole, placed, strict=True):
        if tensor.grad is not None and not _same_gradient(tensor.grad, dtensor.grad):
            return False
    return True


def _same_gradient(whole: torch.Tensor, placed: torch.Tensor | None) -> bool:
    if placed is None:
        return False
    if isinstance(placed, DTensor):
        placed = placed.full_tensor()
    return _close(placed, whole, rtol=1.3e-6)


def _close(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> bool:
    if got.shape != expected.shape:
        return False
    return torch.allclose(expected, got, atol=1e-5, rtol=rtol, equal_nan=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _replaced(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Replace the tensors of the arguments by these, in order."""
    others = iter(tensors)

    def replace(leaf: Any) -> Any:
        return next(others) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(replace, tree)


def _fresh_leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def _run_backward(op: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Run the backward; return whether any output requires gradients."""
    args, kwargs = arguments
    results = _tensors(op(*args, **kwargs))
    outputs = [result for result in results if result.is_floating_point() and result.requires_grad]
    if not outputs:
        return False
    total = outputs[0].sum()
    for output in outputs[1:]:
        total = total + output.sum()
    total.backward()  # type: ignore[no-untyped-call, unused-ignore]
    return True


@contextmanager
def op_strategy_context(op_overload: Any, strategy_func: Callable[..., Any], schema_info: Any = None) -> Iterator[None]:
    """Replace the strategy of an operation for the length of a `with`."""
    with dtensor_parts.replaced_op_strategy(op_overload, strategy_func, schema_info):
        yield
