"""Checks that compare an operation on DTensors with the same operation on full tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from .converter import DTensorConverter

__unittest = True
__rank_frame__ = True


def check_all_placements(test: Any, mesh: DeviceMesh, op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    expected = op(*args, **kwargs)
    converter = DTensorConverter(mesh, args, kwargs)
    for dist_args, dist_kwargs in converter:
        placed = [leaf.placements for leaf in tree_leaves((dist_args, dist_kwargs)) if isinstance(leaf, DTensor)]
        where = f"with arguments placed as {placed}"
        test.assertTrue(converter.successful(), f"not every tensor argument could become a DTensor, {where}")
        test.assertEqual(op(*dist_args, **dist_kwargs).full_tensor(), expected, msg=_after(where))


def check_dtensors(test: Any, op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    full_args, full_kwargs = tree_map(_full_copy, (args, kwargs))
    expected = tree_leaves(op(*full_args, **full_kwargs))
    got = [leaf.full_tensor() for leaf in tree_leaves(op(*args, **kwargs))]
    test.assertEqual(got, expected)


def _full_copy(leaf: Any) -> Any:
    """Copy the full tensor before the operation, which may work in place."""
    return leaf.full_tensor().detach().clone() if isinstance(leaf, DTensor) else leaf


def _after(text: str) -> Callable[[str], str]:
    return lambda difference: f"{difference}\n{text}"
