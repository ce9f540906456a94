"""The ranks agree: a header before every exchange, in which ranks that do different things meet."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .layout import as_real
from .modes import SPMDError


class CallPlace(enum.IntEnum):
    """The place of a rank in a call when it sends a header."""

    START = 0
    BACKWARD = 1
    # Before an optimizer updates rows.
    UPDATE = 2
    END = 3
    # The step raised an error, or refused the call.
    FAILED = 4


class Header(NamedTuple):
    """One rank's view of where it is."""

    # The compiled step, in the order of their first calls; -1 outside of calls.
    step: int
    call: int
    place: int
    # The number of backwards or updates of this call so far.
    turn: int
    params: int
    # Parameters and optimizers that no call has had.
    new: int
    checksum: int
    # A hash of what the exchange is about: the plan of a backward, gradients of earlier calls.
    about: int
    # A hash of the parameters that an optimizer updates, of its options and of which states it has.
    updated: int


_PLACES = {
    CallPlace.START: "at the start",
    CallPlace.BACKWARD: "in backward {}",
    CallPlace.UPDATE: "at update {}",
    CallPlace.END: "at the end",
}


def disagreement(ranks: Sequence[Header]) -> tuple[str, str] | None:
    """The problem and its remedy, if the ranks' headers differ."""
    failed = [rank for rank, header in enumerate(ranks) if header.place == CallPlace.FAILED]
    if failed:
        if len(failed) == len(ranks):
            return None
        return f"The step raised an error on rank {failed[0]}: see there.", "Let all ranks raise, or none of them."
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if _where(first) != _where(other):
            return (
                f"The ranks do different things: rank 0 is {_where(first)}, rank {rank} {_where(other)}.",
                "Call the same steps on every rank, and in each as many backwards and updates.",
            )
        if (first.new, first.params) != (other.new, other.params):
            return (
                f"Rank 0 has {first.params} parameters ({first.new} new objects), rank {rank} has {other.params} "
                f"({other.new}).",
                "Build and change the same model and optimizers on every rank, in the same calls.",
            )
        if first.checksum != other.checksum:
            return (
                f"The parameters of rank {rank} differ from those of rank 0, or gradients or states in use.",
                "Let every update use averaged gradients: those of backward(), of modules and optimizers that the "
                "step's arguments, closure or globals hold. Average others, such as those of torch.autograd.grad.",
            )
        if (first.about, first.updated) != (other.about, other.updated):
            return (
                f"Rank 0 and rank {rank} have gradients of different parameters or shapes, "
                "or options or states of an optimizer.",
                "Let every rank clear, change and use the same gradients, in the same place, with the same options.",
            )
    return None


def _where(header: Header) -> str:
    if header.step < 0:
        return "in a backward outside of a step"
    return f"{_PLACES[CallPlace(header.place)].format(header.turn + 1)} of call {header.call} of step {header.step}"


class StepMeeting:
    """The ranks that train together, where this one is in a call, and the exchange of headers."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cpu")
        self.step, self.call, self.params, self.new = -1, 0, 0, 0
        # The tensors that are to be the same on all ranks, whose checksum the next header tells.
        self.watched: Sequence[torch.Tensor] = []
        # Whether all ranks raise the error of this call: nobody is to be told.
        self.is_known = False
        self._pending: tuple[Any, list[torch.Tensor], bool] | None = None

    def is_open(self) -> bool:
        """Whether the group still exists."""
        return dist.is_initialized() and dist.group.WORLD is self.group

    def begin(self, step: int, call: int) -> None:
        """Begin a call."""
        self.step, self.call, self.params, self.new = step, call, 0, 0
        self.watched, self.is_known = [], False

    def end(self) -> None:
        """End a call: headers that follow are those of backwards outside of calls."""
        self.step, self.call, self.params, self.new, self.watched = -1, 0, 0, 0, []

    def send(self, place: CallPlace, turn: int = 0, about: int = 0, updated: int = 0) -> None:
        """Send this rank's header, and do not wait."""
        if place is not CallPlace.FAILED:
            self.check()
        if self.world == 1:
            return
        checksum, self.watched = checksum_of(self.watched), []
        header = Header(self.step, self.call, place, turn, self.params, self.new, checksum, about, updated)
        mine = torch.tensor(header, dtype=torch.int64, device=self.device)
        rows = list(mine.new_empty(self.world, len(mine)))
        if self._pending is not None:
            self._pending[0].wait()
        self._pending = dist.all_gather(rows, mine, self.group, async_op=True), rows, place is CallPlace.FAILED

    def check(self) -> None:
        """Wait for the headers that are on their way, and raise an error on every rank if they differ."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        work, rows, has_failed = pending
        work.wait()
        ranks = [Header(*row.tolist()) for row in rows]
        problem = None if has_failed else disagreement(ranks)
        if problem is not None:
            # A rank that failed in an earlier call is in this one now, and is to be told.
            self.is_known = all(header.place != CallPlace.FAILED or header.call == self.call for header in ranks)
            raise SPMDError(problem[0], remedy=problem[1])

    def meet(self, place: CallPlace, turn: int = 0, about: int = 0, updated: int = 0) -> None:
        """Send this rank's header, and wait for those of the others."""
        self.send(place, turn, about, updated)
        self.check()

    def objects(self, value: Any) -> list[Any]:
        """The object of each rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, self.group)
        return found


# The calls in which all replicated parameters are summed. Later ones sum a few.
EARLY = 8


def in_turns(replicated: Sequence[torch.Tensor], call: int) -> Sequence[torch.Tensor]:
    """The parameters to compare in a call. Later ones take turns: parameters that differ go on to differ."""
    if call < EARLY or len(replicated) <= 4:
        return replicated
    begin = 4 * call % len(replicated)
    return replicated[begin : begin + 4]


# A checksum adds bit patterns, so that it is exact, and NaN equals NaN.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The words in a row of a large tensor. The sums of rows and columns are weighted by their place, so that words which
# change places change a sum. The number is odd, so that flipping the highest bits of a whole row does, too.
_SUMS = 127
_LARGE = 4096
# An odd number of 63 bits, whose multiples have no pattern.
_MIXER = 0x4F1BBCDCBFA53E0B


@torch.no_grad()
def checksum_of(tensors: Iterable[torch.Tensor]) -> int:
    """A number by which ranks see whether they have the same values in the same places."""
    words: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.layout is torch.strided:
            words.setdefault(tensor.device, []).extend(_words(as_real(tensor).reshape(-1)))
    return hash(tuple(map(_sum_by_place, words.values()))) % (1 << 62)


def _words(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bit patterns of numbers, up to eight bytes each; those of a large tensor added."""
    size = max(size for size in _INTEGERS if flat.nbytes % size == 0)
    begin = flat.storage_offset() * flat.element_size()
    words = (flat.clone() if begin % size else flat).view(_INTEGERS[size])
    if len(words) >= _LARGE:
        grid = words[: len(words) // _SUMS * _SUMS].view(-1, _SUMS)
        yield grid.sum(0, dtype=torch.int64)
        yield grid.sum(1, dtype=torch.int64)
        words = words[grid.numel() :]
    yield words.long()


def _sum_by_place(words: list[torch.Tensor]) -> int:
    together = torch.cat(words)
    weights = _MIXER * torch.arange(1, len(together) + 1, device=together.device)
    weights = weights ^ (weights >> 32) | 1
    # Highest bits count in lower ones, too.
    return int(((together ^ (together >> 32)) * weights).sum())
