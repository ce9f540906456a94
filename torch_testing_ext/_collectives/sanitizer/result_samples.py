"""Samples of the inputs and outputs of collectives, which a rank keeps."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch

from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec

from .files_beside_logs import results_beside
from .flying_buffers import has_memory

# The samples of each part of a tensor: so many pieces of so many bytes, which may be the whole part.
PIECES, PIECE = 64, 128
# The most bytes of all samples of a rank in a test. What comes later is not compared.
MOST_BYTES = 1 << 22
# The kinds, by what a part of the output is made of.
REDUCED = ("all_reduce", "all_reduce_coalesced", "reduce")
OF_ALL = ("all_gather", "all_gather_into_tensor", "gather")
REDUCED_PARTS = ("reduce_scatter", "reduce_scatter_tensor")
EXCHANGED = ("all_to_all", "all_to_all_single")
_KNOWN = (*REDUCED, *OF_ALL, *REDUCED_PARTS, *EXCHANGED, "broadcast", "scatter", "send", "recv")
# One tensor has the parts of all members, one after the other: of the outputs, and of the inputs.
_FLAT_OUTPUTS = ("all_gather_into_tensor", "all_to_all_single")
_FLAT_INPUTS = ("reduce_scatter_tensor", "all_to_all_single")
# A code, and an instruction in it. Which line that is takes long to find, and is rarely asked.
Place: TypeAlias = tuple[CodeType, int]
# The bytes of a part; None if they cannot be read.
Part: TypeAlias = "bytes | None"


class Result(NamedTuple):
    """A call with samples of its inputs and outputs, and the line where its caller has waited. `order`: its number."""

    order: int
    name: str
    op: str | None
    root: int | None
    dtype: str
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    waited_at: Site | None


@dataclass(slots=True)
class Begun:
    """A call that is about to be issued, with samples of its inputs."""

    name: str
    op: int | None
    root: int | None
    dtype: torch.dtype
    inputs: tuple[Part, ...]
    outputs: Sequence[torch.Tensor]


class ResultSampler:
    """Keeps the samples of a rank, and writes them when its test is over. `place`: the one of the program, now."""

    def __init__(self, log: Path, place: Callable[[], Place | None]):
        self._path = results_beside(log)
        self._path.unlink(missing_ok=True)
        self._place = place
        self._ended: list[tuple[Begun, int, tuple[Part, ...], Place | None]] = []
        self._left = MOST_BYTES

    def begin(
        self,
        spec: OpSpec,
        args: tuple[Any, ...],
        group: Any,
        name: str,
        op: int | None,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> Begun | None:
        """A call is about to be issued: take samples of its inputs, if its result can be compared."""
        if spec.kind not in _KNOWN or self._left <= 0 or operation_hook.is_without_data(group):
            return None
        if spec.splits is not None and (args[spec.splits] or args[spec.splits + 1]):
            return None
        dtypes = {tensor.dtype for tensor in (*inputs, *outputs)}
        if len(dtypes) != 1:
            return None
        size = group.size()
        parts = self._take(_split(inputs, size) if spec.kind in _FLAT_INPUTS else inputs)
        root = None if spec.root is None else int(args[spec.root])
        outputs = _split(outputs, size) if spec.kind in _FLAT_OUTPUTS else outputs
        return Begun(name, op, root, dtypes.pop(), parts, outputs)

    def end(self, begun: Begun, order: int) -> None:
        """The wait for a call is over: take samples of its outputs, before its caller can use them."""
        parts = self._take(begun.outputs)
        # Nobody knows how long the tensors should live.
        begun.outputs = ()
        self._ended.append((begun, order, parts, self._place()))

    def _take(self, tensors: Sequence[torch.Tensor]) -> tuple[Part, ...]:
        """Take samples of these tensors, and count their bytes."""
        parts = _parts(tensors)
        for part in parts:
            if part is not None:
                self._left -= len(part)
        return parts

    def finish(self) -> None:
        results = []
        for begun, order, parts, place in self._ended:
            dtype = str(begun.dtype).removeprefix("torch.")
            op = operation_hook.name_of_reduce_op(begun.op)
            waited_at = None if place is None else _site_at(place)
            results.append(Result(order, begun.name, op, begun.root, dtype, begun.inputs, parts, waited_at))
        self._ended.clear()
        if results:
            self._path.write_bytes(pickle.dumps(results))


def _site_at(place: Place) -> Site:
    code, last = place
    lines = (line for start, end, line in code.co_lines() if start <= last < end)
    return Site(code.co_filename, next(lines, None) or code.co_firstlineno, code.co_name)


def _split(tensors: Sequence[torch.Tensor], size: int) -> Sequence[torch.Tensor]:
    """The parts of one tensor, as many as the group has members; none if it cannot be split."""
    (tensor,) = tensors
    if not has_memory(tensor) or not tensor.is_contiguous() or tensor.numel() % size or not tensor.numel():
        return ()
    return tensor.detach().view(-1).chunk(size)


def _parts(tensors: Sequence[torch.Tensor]) -> tuple[Part, ...]:
    return tuple([_bytes_of(tensor) for tensor in tensors])


def _bytes_of(tensor: torch.Tensor) -> Part:
    """The bytes of a tensor in the memory of this process; of a large one, those of pieces."""
    if not has_memory(tensor) or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    size, width = tensor.nbytes, tensor.element_size()
    try:
        address = tensor.data_ptr() if size else 0
    except RuntimeError:  # a tensor without memory of its own: that of a trace, or a subclass
        return None
    if not address:
        return None
    if size <= PIECES * PIECE:
        return ctypes.string_at(address, size)
    starts = (number * (size - PIECE) // (PIECES - 1) for number in range(PIECES))
    return b"".join([ctypes.string_at(address + start - start % width, PIECE) for start in starts])
