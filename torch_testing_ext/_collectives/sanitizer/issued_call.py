"""A rank's note of one collective, send or receive: everything that its peers must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_testing_ext._collectives.records.issued_calls import Call

# A tensor as its shape and the name of its type.
Tensor = tuple[tuple[int, ...], str]
_PUT_TOGETHER = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
    *("gather", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)


@dataclass(frozen=True)
class Issued:
    """One operation as a rank has called it. `splits`: those of the output and of the input, along dimension 0."""

    kind: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    op: str | None = None
    root: int | None = None
    # The other rank of a send or receive, as the group numbers it; None: a receive from any rank.
    peer: int | None = None
    tag: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    # The size of the group.
    size: int = 0
    timeout: float | None = None
    # The rank goes on only when it is over.
    blocks: bool = False
    # How torch puts parts together: placements of DTensors, or a dimension.
    parts: tuple[str, ...] = ()

    @property
    def is_p2p(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def is_compared_in_pairs(self) -> bool:
        """Whether it must agree with what another member has called, beyond what all have in common."""
        return self.is_p2p or self.kind in ("all_to_all", "all_to_all_single")

    def to_call(self) -> Call:
        """The call as the rules read it, without what only the log knows: its order, its line, its thread."""
        shown = self.outputs if self.kind in ("recv", "scatter") else self.inputs
        is_exchange = self.kind in ("all_to_all", "all_to_all_single")
        return Call(
            kind=self.kind,
            shapes=tuple(str(list(shape)) for shape, _ in shown),
            inputs=_in_words(shown),
            given=() if self.kind == "recv" else _in_words(self.inputs),
            agreement=self.agreement(),
            root=self.root,
            timeout=self.timeout or math.inf,
            details=tuple(self._details()),
            exchange=self._exchange() if is_exchange else None,
            is_p2p=self.is_p2p,
            peer=self.peer if self.is_p2p else None,
            tag=self.tag if self.is_p2p else 0,
            tells_end=False,
            blocks=self.blocks,
            layout=self.layout(),
            parts=self.parts,
        )

    def agreement(self) -> tuple[Any, ...]:
        """The properties in which all members of the group must agree, besides the root.

        Shapes may differ where the numbers of elements are equal.
        """
        inputs, outputs = _counts(self.inputs), _counts(self.outputs)
        types = tuple(sorted({dtype for _, dtype in (*self.inputs, *self.outputs)}))
        sizes: tuple[Any, ...]
        match self.kind:
            case "scatter":  # the inputs are the root's
                sizes = outputs[:1]
            case "all_gather" | "all_gather_coalesced":
                sizes = (outputs,)
            case "reduce_scatter":
                sizes = (inputs,)
            case "all_to_all" | "all_to_all_single" | "barrier" | "monitored_barrier":
                sizes = ()
            case "recv":
                sizes = outputs
            case _:
                sizes = inputs
        return self.kind, sizes, types, self.op

    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts that are put together or taken apart, without dimensions of one element.

        Parts of other shapes make a wrong tensor. A flat part has no shape of its own.
        """
        if self.kind not in _PUT_TOGETHER:
            return ()
        parts = self.outputs if "scatter" in self.kind else self.inputs
        shapes = tuple(tuple(size for size in shape if size != 1) for shape, _ in parts)
        return shapes if all(len(shape) > 1 for shape in shapes) else ()

    def _details(self) -> list[str]:
        details = []
        if self.op is not None:
            details.append(self.op)
        if self.root is not None:
            details.append(f"root {self.root}")
        if self.splits is not None and any(self.splits):
            of_outputs, of_inputs = self.splits
            details.append(f"splits {list(of_inputs)} to {list(of_outputs)}")
        elif self.kind in ("all_gather", "all_to_all") and len({shape for shape, _ in self.outputs}) > 1:
            details.append(f"into {[list(shape) for shape, _ in self.outputs]}")
        types = {dtype for _, dtype in self.outputs}
        if self.kind != "scatter" and self.inputs and types - {dtype for _, dtype in self.inputs}:
            details.append(f"into {', '.join(sorted(types))}")
        return details

    def _exchange(self) -> tuple[tuple[int, ...], ...]:
        """The number of elements that go to each member, and that come from each."""
        if self.kind == "all_to_all":
            return _counts(self.inputs), _counts(self.outputs)
        of_outputs, of_inputs = self.splits or ((), ())
        return _parts(self.inputs[0], of_inputs, self.size), _parts(self.outputs[0], of_outputs, self.size)


def _parts(tensor: Tensor, splits: Sequence[int], size: int) -> tuple[int, ...]:
    """The elements of a tensor that go to each of `size` members, or come from it."""
    shape, _ = tensor
    if not splits:
        of_each_member = math.prod(shape) // max(size, 1)
        return (of_each_member,) * size
    row = math.prod(shape[1:])
    return tuple(rows * row for rows in splits)


def _in_words(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(f"{list(shape)} {dtype}" for shape, dtype in tensors)


def _counts(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(math.prod(shape) for shape, _ in tensors)
