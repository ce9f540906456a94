"""A tensor subclass for tests of subclasses, under the names of torch.testing._internal.two_tensor.

It holds two tensors and runs every operation on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_testing_ext._torch.tensors import pytrees, tensor_subclasses


class TwoTensor(torch.Tensor):
    """Two tensors of the same shape, dtype and device, which go through every operation side by side."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(
        cls: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
        *,
        requires_grad: bool | None = None,
    ) -> TwoTensor:
        """Make the tensor that stands for both. Raises AssertionError unless they are alike."""
        for name in ("device", "layout", "requires_grad", "dtype", "shape"):
            of_a, of_b = getattr(a, name), getattr(b, name)
            if of_a != of_b:
                raise AssertionError(f"Expected a.{name} == b.{name}, got {of_a} != {of_b}")
        if a.stride() != b.stride():
            raise AssertionError(f"Expected a.stride() == b.stride(), got {a.stride()} != {b.stride()}")
        if a.storage_offset() != b.storage_offset():
            raise AssertionError(
                f"Expected a.storage_offset() == b.storage_offset(), got {a.storage_offset()} != {b.storage_offset()}"
            )
        size = a.size() if outer_size is None else outer_size
        stride = a.stride() if outer_stride is None else outer_stride
        made: TwoTensor = tensor_subclasses.make_wrapper_subclass(
            cls, a, size, stride, bool(requires_grad or a.requires_grad)
        )
        return made

    @tensor_subclasses.exportable_constructor
    def __init__(
        self, a: Any, b: Any, outer_size: Any = None, outer_stride: Any = None, *, requires_grad: Any = None
    ) -> None:
        self.a = a
        self.b = b

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TwoTensor({self.a!r}, {self.b!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, meta: Any, outer_size: Any, outer_stride: Any) -> TwoTensor:
        if meta is not None:
            raise AssertionError("Expected meta to be None")
        return TwoTensor(inner_tensors["a"], inner_tensors["b"], outer_size, outer_stride)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first, second = (_run(func, part, args, kwargs) for part in ("a", "b"))
        leaves, spec = pytrees.tree_flatten(first)
        # Results that are not tensors are taken to be the same for both.
        both: list[Any] = []
        for leaf, other in zip(leaves, pytrees.tree_leaves(second), strict=True):
            both.append(cls(leaf, other) if isinstance(leaf, torch.Tensor) else leaf)
        result = pytrees.tree_unflatten(both, spec)
        return tensor_subclasses.correct_aliasing(func, args, kwargs, result)

    def get_elem_a(self) -> torch.Tensor:
        return self.a


def _run(func: Any, part: str, args: Any, kwargs: Any) -> Any:
    def unwrap(value: Any) -> Any:
        return pytrees.tree_map_only(TwoTensor, lambda tensor: getattr(tensor, part), value)

    return func(*unwrap(args), **unwrap(kwargs))


_DispatchMode: Any = tensor_subclasses.dispatch_mode_class()


class TwoTensorMode(_DispatchMode):  # type: ignore[misc, unused-ignore]
    """Makes a TwoTensor of every tensor that is created inside the mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if tensor_subclasses.is_tensor_constructor(func):
            return TwoTensor(out, out.clone())
        return out
