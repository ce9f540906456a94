"""A rank's note of one collective, send or receive: everything that its peers must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# A tensor as its shape and the name of its type.
Tensor = tuple[tuple[int, ...], str]


_PUT_TOGETHER = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)


@dataclass(frozen=True)
class Issued:
    """One operation as a rank has called it. `splits`: those of the output and of the input, along dimension 0."""

    kind: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    op: str | None = None
    root: int | None = None
    peer: int | None = None  # of a send or receive, in the group; None: a receive from any rank
    tag: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    size: int = 0  # of the group
    timeout: float | None = None
    blocks: bool = False  # the rank goes on only when it is over
    parts: tuple[str, ...] = ()  # how torch puts parts together: placements of DTensors, or a dimension

    @property
    def is_p2p(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def is_compared_in_pairs(self) -> bool:
        """Must it agree with what another member has called, beyond what all have in common?"""
        return self.is_p2p or self.kind in ("all_to_all", "all_to_all_single")

    def to_entry(self) -> dict[str, Any]:
        """The fields of an entry for `make_record`."""
        shown = self.outputs if self.kind == "recv" else self.inputs
        entry: dict[str, Any] = {
            "profiling_name": f"c10d:{self.kind}",
            "input_sizes": [list(shape) for shape, _ in shown],
            "input_dtypes": [dtype for _, dtype in shown],
            "is_p2p": self.is_p2p,
            "agreement": self.agreement(),
            "details": self._details(),
            "timeout_ms": self.timeout and 1000 * self.timeout,
            "layout": self.layout(),
            "parts": self.parts,
            "blocks": self.blocks,
        }
        if self.is_p2p:
            entry["peer"], entry["tag"] = self.peer, self.tag
        if self.kind in ("all_to_all", "all_to_all_single"):
            entry["exchange"] = self._exchange()
        return entry

    def agreement(self) -> list[Any]:
        """The properties in which all members of the group must agree.

        Shapes may differ where the numbers of elements are equal.
        """
        inputs, outputs = _counts(self.inputs), _counts(self.outputs)
        types = sorted({dtype for _, dtype in (*self.inputs, *self.outputs)})
        sizes: list[Any]
        match self.kind:
            case "scatter":  # the inputs are the root's
                sizes = outputs[:1]
            case "all_gather" | "all_gather_coalesced":
                sizes = [outputs]
            case "reduce_scatter":
                sizes = [inputs]
            case "all_to_all" | "all_to_all_single" | "barrier" | "monitored_barrier":
                sizes = []
            case "recv":
                sizes = outputs
            case _:
                sizes = inputs
        return [self.kind, sizes, types, self.op, self.root]

    def layout(self) -> list[list[int]]:
        """The shapes of the parts that are put together or taken apart, without dimensions of one element.

        Parts of other shapes make a wrong tensor. A flat part has no shape of its own.
        """
        if self.kind not in _PUT_TOGETHER:
            return []
        parts = self.outputs[:1] if self.kind == "scatter" else self.outputs if "scatter" in self.kind else self.inputs
        shapes = [[size for size in shape if size != 1] for shape, _ in parts]
        return shapes if all(len(shape) > 1 for shape in shapes) else []

    def _details(self) -> list[str]:
        details = [self.op] if self.op is not None else []
        details += [f"root {self.root}"] if self.root is not None else []
        if self.splits is not None and any(self.splits):
            details.append(f"splits {list(self.splits[1])} to {list(self.splits[0])}")
        elif self.kind in ("all_gather", "all_to_all") and len({shape for shape, _ in self.outputs}) > 1:
            details.append(f"into {[list(shape) for shape, _ in self.outputs]}")
        return details

    def _exchange(self) -> list[list[int]]:
        """The number of elements that go to each member, and that come from each."""
        if self.kind == "all_to_all":
            return [_counts(self.inputs), _counts(self.outputs)]
        outgoing, incoming = self.splits or ((), ())
        sides = ((self.inputs, incoming), (self.outputs, outgoing))
        return [_parts(tensors[0], splits, self.size) for tensors, splits in sides]


def _parts(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    shape, _ = tensor
    count = math.prod(shape)
    if not splits:
        return [count // max(size, 1)] * size
    row = math.prod(shape[1:])
    return [each * row for each in splits]


def _counts(tensors: Sequence[Tensor]) -> list[int]:
    return [math.prod(shape) for shape, _ in tensors]
