"""DTensorConverter, which places the tensor arguments of a call on a mesh in all ways, and checks with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torch_testing_ext._torch.tensors import dtensor_parts
from torch_testing_ext._torch.tensors.pytrees import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

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
        """Whether there were tensors, and each of them has become a DTensor so far."""
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
