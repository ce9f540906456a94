"""A mode that sees which tensors each operation of a thread reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_testing_ext._torch.tensors import nested_tensors, pytrees

# The modules of tensors whose operations are seen as those on their parts. 2.11 to 2.15.
OUTER = ("torch.distributed.tensor", "torch.distributed._functional_collectives")


class TensorUses(TorchDispatchMode):
    """Reports for each operation of this thread, before it runs, which tensors it reads and which it writes.

    It leaves out views, which do neither, and collectives. `TorchDispatchMode`: all versions.

    torch keeps its compiler out of each mode, for which it imports the compiler. That takes seconds, so it is left
    until something else has imported it: the method is added to the class below.
    """

    def __init__(self, on_use: Callable[[str, list[torch.Tensor], list[torch.Tensor]], None] | None):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_use = on_use

    def on_call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.leaves(types):
            return NotImplemented
        if self._on_use and not func.namespace.startswith(("c10d", "_c10d")) and not is_view(func):
            read: list[torch.Tensor] = []
            written: list[torch.Tensor] = []
            for at, argument in enumerate(func._schema.arguments):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                value = args[at] if at < len(args) else kwargs.get(argument.name)
                tensors = (leaf for leaf in pytrees.tree_leaves(value) if isinstance(leaf, torch.Tensor))
                (written if is_written else read).extend(tensors)
            self._on_use(str(func).removesuffix(".default"), read, written)
        self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result

    def leaves(self, types: Any) -> bool:
        """Whether an operation on tensors of these classes is left to them. Operations on their parts follow."""
        return False

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation is about to run, be it a view or a collective."""

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation has run, be it a view or a collective."""


# Imports the compiler when it is called. `torch._disable_dynamo`: 2.11 to 2.15.
def _call(mode: TensorUses, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return mode.on_call(func, types, args, kwargs)


_uncompiled: Callable[..., Any] = torch._disable_dynamo(_call, recursive=True)  # type: ignore[attr-defined]
# None where the thread compiles nothing. 2.11 to 2.15.
_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _dispatch(mode: TensorUses, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    call = _call if _callback() is None else _uncompiled
    return call(mode, func, types, args, kwargs or {})


TensorUses.__torch_dispatch__ = _dispatch  # type: ignore[assignment, method-assign]


def name_of(func: Any) -> str:
    """The name of an operation that a mode sees, such as "aten::equal". `_schema`: 2.11 to 2.15."""
    return str(func._schema.name)


def name_in_python(func: Any) -> str:
    """The name by which a program calls an operation, such as "equal"."""
    name = name_of(func).removeprefix("aten::").lstrip("_")
    return "unique" if name in ("unique2", "unique_dim") else name


@functools.cache
def is_view(func: Any) -> bool:
    """Whether an operation only gives another view of a tensor."""
    aliases = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


# By operation, the arguments whose values decide what Python sees of it: whether tensors are equal, or the size of the
# result. The methods that give numbers, such as `item`, are seen by themselves. 2.11 to 2.15.
_SEEN = {
    **dict.fromkeys(("equal", "allclose"), (0, 1)),
    **dict.fromkeys(("index", "masked_select"), (1,)),
    **dict.fromkeys(("nonzero", "bincount", "repeat_interleave", "_unique2", "unique_dim", "unique_consecutive"), (0,)),
}


def seen_by_python(func: Any, args: Any) -> list[torch.Tensor]:
    """The tensors whose values Python sees by an operation such as `torch.equal` or `nonzero`, or by a mask."""
    name = name_of(func).removeprefix("aten::")
    tensors = list(nested_tensors.tensors_in([args[at] for at in _SEEN.get(name, ())]))
    return tensors if name != "index" else [index for index in tensors if index.dtype in (torch.bool, torch.uint8)]


# Operations that only bring values elsewhere, as those do which prepare a call.
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "_foreach_copy_", "_to_copy", "clone", "detach", "contiguous", "lift_fresh", "resize_", "set_"),
        *("cat", "stack", "split_with_sizes_copy", "_chunk_cat", "zero_", "fill_", "zeros_like", "empty_like"),
        *("ones_like", "new_empty", "new_zeros", "item", "_local_scalar_dense", "equal", "is_nonzero"),
    )
)


def computes(func: Any) -> bool:
    """Whether an operation computes, if it is given numbers: it is no view, and brings values not only elsewhere."""
    return func.namespace == "aten" and name_of(func) not in _MOVES and not is_view(func)


def multiplies(func: Any) -> bool:
    """Whether torch counts the floating-point operations of this one: products and convolutions.

    `_overloadpacket`, `flop_registry`: 2.11 to 2.15.
    """
    from torch.utils.flop_counter import flop_registry

    return func._overloadpacket in flop_registry
