"""Results of asynchronous calls, compared with what their inputs give: a buffer that was written meanwhile shows there.

No counter of torch knows of writes through NumPy, DLPack or another storage, and the call itself writes its outputs.
So each rank keeps samples of the inputs, taken before the call, and of the outputs, taken when the wait is over. At the
end of the test they are in a file beside the log, and the parent compares them.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch

from torch_testing_ext._process.words import list_of
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext._torch.operations.operation_hook import OpSpec

from .failure import Site
from .findings import Doing, Finding, FindingKind, pairs_of
from .records import Call, RankRecord, SharedGroup, shared_groups, whole_records
from .sanitizer_log import results_beside
from .tensor_checks import has_memory

# Of each part of a tensor: pieces of so many bytes, which are all of a part that has no more.
_PIECES, _PIECE = 64, 128
# In bytes, of all samples of a rank in a test. What comes later is not compared.
MOST_BYTES = 1 << 22

# The kinds, by what a part of the output is made of.
_REDUCED = ("all_reduce", "all_reduce_coalesced", "reduce")
_OF_ALL = ("all_gather", "all_gather_into_tensor", "gather")
_REDUCED_PARTS = ("reduce_scatter", "reduce_scatter_tensor")
_EXCHANGED = ("all_to_all", "all_to_all_single")
_KNOWN = (*_REDUCED, *_OF_ALL, *_REDUCED_PARTS, *_EXCHANGED, "broadcast", "scatter", "send", "recv")
# One tensor has the parts of all members, one after the other: of the outputs, and of the inputs.
_FLAT_OUTPUTS = ("all_gather_into_tensor", "all_to_all_single")
_FLAT_INPUTS = ("reduce_scatter_tensor", "all_to_all_single")

# A code, and an instruction in it. Which line that is takes long to find, and is rarely asked.
Place: TypeAlias = tuple[CodeType, int]
# The bytes of a part; None if they cannot be read.
_Part: TypeAlias = "bytes | None"


class Result(NamedTuple):
    """A call with samples of its inputs and outputs, and the line where its caller has waited. `order`: its number."""

    order: int
    name: str
    op: str | None
    root: int | None
    dtype: str
    inputs: tuple[_Part, ...]
    outputs: tuple[_Part, ...]
    waited_at: Site | None


@dataclass(slots=True)
class Begun:
    """A call that is about to be issued, with samples of its inputs."""

    name: str
    op: int | None
    root: int | None
    dtype: torch.dtype
    inputs: tuple[_Part, ...]
    outputs: Sequence[torch.Tensor]


# --------------------------------------------------------------------------------------------------------------------
# In a rank.


class ResultSampler:
    """Keeps the samples of a rank, and writes them when its test is over. `place`: the one of the program, now."""

    def __init__(self, log: Path, place: Callable[[], Place | None]):
        self._path = results_beside(log)
        self._path.unlink(missing_ok=True)
        self._place = place
        self._ended: list[tuple[Begun, int, tuple[_Part, ...], Place | None]] = []
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
        parts = _parts(inputs, size if spec.kind in _FLAT_INPUTS else 1)
        self._left -= sum(map(len, filter(None, parts)))
        root = None if spec.root is None else int(args[spec.root])
        outputs = _split(outputs, size) if spec.kind in _FLAT_OUTPUTS else outputs
        return Begun(name, op, root, dtypes.pop(), parts, outputs)

    def end(self, begun: Begun, order: int) -> None:
        """The wait for a call is over: take samples of its outputs, before its caller can use them."""
        parts = _parts(begun.outputs, 1)
        self._left -= sum(map(len, filter(None, parts)))
        # Nobody knows how long the tensors should live.
        begun.outputs = ()
        self._ended.append((begun, order, parts, self._place()))

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


def _parts(tensors: Sequence[torch.Tensor], size: int) -> tuple[_Part, ...]:
    return tuple(_bytes_of(part) for part in (tensors if size == 1 else _split(tensors, size)))


def _bytes_of(tensor: torch.Tensor) -> _Part:
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
    if size <= _PIECES * _PIECE:
        return ctypes.string_at(address, size)
    starts = (number * (size - _PIECE) // (_PIECES - 1) for number in range(_PIECES))
    return b"".join([ctypes.string_at(address + start - start % width, _PIECE) for start in starts])


# --------------------------------------------------------------------------------------------------------------------
# In the parent.


def results_of(log: Path) -> list[Result]:
    """The results that a rank has left; none if it has not come to the end of its test."""
    with suppress(OSError, EOFError, pickle.UnpicklingError):
        results: list[Result] = pickle.loads(results_beside(log).read_bytes())
        return results
    return []


class _Member(NamedTuple):
    """A member of a group in a call: its rank, the call, and the result."""

    rank: int
    call: Call
    result: Result


def wrong_results(records: Sequence[RankRecord], results: Mapping[int, Sequence[Result]]) -> Iterator[Finding]:
    """Find the results that are not those of the inputs: a buffer was written while the call was running."""
    known = {(rank, result.order): result for rank, of_rank in results.items() for result in of_rank}
    for group, calls in _calls_of_all(records):
        members = [
            _Member(rank, call, known[rank, call.order]) for rank, call in calls.items() if (rank, call.order) in known
        ]
        if len(members) == len(calls) and not any(member.call.raised for member in members):
            yield from _wrong_result(group, members)


def _calls_of_all(records: Sequence[RankRecord]) -> Iterator[tuple[SharedGroup, dict[int, Call]]]:
    """The calls that belong together, by rank: those of all members of a group, and messages."""
    by_rank = whole_records(records)
    for group in shared_groups(records):
        if by_rank.keys() >= set(group.ranks):
            issued = [by_rank[rank].calls.get(group.key, ()) for rank in group.ranks]
            for calls in zip(*issued, strict=False):
                yield group, dict(zip(group.ranks, calls, strict=True))
    for pair in pairs_of(records):
        yield pair.group, {pair.source: pair.send, pair.target: pair.receive}


def _wrong_result(group: SharedGroup, members: Sequence[_Member]) -> Iterator[Finding]:
    wrong: list[tuple[_Member, str]] = []
    for at, member in enumerate(members):
        how = _difference(at, members)
        if how:
            wrong.append((member, how))
    if not wrong:
        return
    first, how = wrong[0]
    ranks = tuple(member.rank for member, _ in wrong)
    text = f"a buffer of {first.result.name} was written before wait(): {how}"
    sentence = f"{list_of(ranks)}: {text}"
    if first.result.waited_at is not None:
        sentence += f" ({first.result.waited_at})"
    if first.call.site is not None:
        sentence += f", issued at {first.call.site}"
    lines = tuple(Doing(member.rank, f"a buffer was written: {how}", member.result.waited_at) for member, how in wrong)
    yield Finding(FindingKind.RACE, sentence, lines, ranks)


def _difference(at: int, members: Sequence[_Member]) -> str:
    """The first part of a member's output that is not as the inputs of all give it, in words; "" if there is none."""
    member = members[at]
    kind = member.call.kind
    if kind in ("reduce", "gather") and member.result.root != at:
        return ""
    for number, part in enumerate(member.result.outputs):
        sources = _sources(kind, at, number, members)
        if part is None or any(source is None or len(source) != len(part) for source in sources) or not sources:
            continue
        given = [source for source in sources if source is not None]
        how = _compared(part, given, member.result)
        if how:
            return how
    return ""


def _sources(kind: str, at: int, number: int, members: Sequence[_Member]) -> list[_Part]:
    """The parts of inputs that make a part of a member's output. Parts that are not known are left out."""
    root = members[at].result.root or 0
    places: list[tuple[int, int]] = []
    everybody = range(len(members))
    if kind in _REDUCED:
        places = [(other, number) for other in everybody]
    elif kind in _OF_ALL:
        places = [(number, 0)]
    elif kind in _REDUCED_PARTS:
        places = [(other, at) for other in everybody]
    elif kind in _EXCHANGED:
        places = [(number, at)]
    elif kind == "broadcast":
        places = [(root, number)]
    elif kind == "scatter":
        places = [(root, at)]
    elif kind == "recv":
        places = [(0, number)]
    parts: list[_Part] = []
    for other, place in places:
        inputs = members[other].result.inputs if other < len(members) else ()
        parts.append(inputs[place] if place < len(inputs) else None)
    return parts


def _compared(part: bytes, sources: Sequence[bytes], result: Result) -> str:
    """Describe the first element of an output that its inputs do not give; "" if there is none."""
    dtype: torch.dtype = getattr(torch, result.dtype)
    if len(sources) == 1 and result.op is None:
        if part == sources[0]:
            return ""
        found, wanted = _numbers(part, dtype), _numbers(sources[0], dtype)
        differ = found.view(torch.uint8).view(len(found), -1) != wanted.view(torch.uint8).view(len(wanted), -1)
        is_wrong = differ.any(1)
    else:
        found = _numbers(part, dtype)
        reduced = _reduced([_numbers(source, dtype) for source in sources], result.op or "")
        if reduced is None:
            return ""
        wanted, most = reduced
        is_wrong = (found.to(wanted.dtype) - wanted).abs() > most
        if dtype.is_floating_point or dtype.is_complex:
            is_wrong &= torch.isfinite(found)
    numbers = is_wrong.nonzero()
    if not len(numbers):
        return ""
    number = int(numbers[0])
    where = f"element {number}" if len(part) < _PIECES * _PIECE else "an element"
    return f"{where} is {found[number].item()}, the inputs give {wanted[number].item()}"


def _numbers(part: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(part), dtype=dtype)


def _reduced(inputs: Sequence[torch.Tensor], op: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The reduction of inputs, and how much a result may differ from it; None if that is not known here."""
    dtype = inputs[0].dtype
    if dtype.is_complex or dtype in (torch.bool, torch.uint64):
        return None
    if not dtype.is_floating_point:
        return _reduced_numbers(torch.stack([tensor.to(torch.int64) for tensor in inputs]), op, dtype)
    stacked = torch.stack([tensor.to(torch.float64) for tensor in inputs])
    info = torch.finfo(dtype)
    match op:
        case "sum":
            wanted, scale = stacked.sum(0), stacked.abs().sum(0)
        case "product":
            wanted = stacked.prod(0)
            # A product that is too small on the way is not compared.
            is_small = stacked.abs().clamp(max=1).prod(0) < info.tiny
            scale = torch.where(is_small, torch.inf, wanted.abs())
        case "min":
            wanted, scale = stacked.amin(0), torch.zeros(())
        case "max":
            wanted, scale = stacked.amax(0), torch.zeros(())
        case _:
            return None
    most = 2 * len(inputs) * (info.eps * scale + info.tiny)
    # What overflows, or is not finite, is not compared.
    most = torch.where(torch.isfinite(wanted) & (wanted.abs() < info.max / 2), most, torch.inf)
    return wanted, most


def _reduced_numbers(stacked: torch.Tensor, op: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The reduction of whole numbers, which has one result."""
    match op:
        case "sum":
            wanted = stacked.sum(0)
        case "product":
            wanted = stacked.prod(0)
        case "min":
            wanted = stacked.amin(0)
        case "max":
            wanted = stacked.amax(0)
        case _:
            return None
    # It wraps around as the type does.
    return wanted.to(dtype).to(torch.int64), torch.zeros((), dtype=torch.int64)
