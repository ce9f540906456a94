"""Averages gradients during every backward.

Hooks on the parameters report what a backward touches. The first backward of a kind (the n-th one of a call of a step)
ends with an exchange of what each rank has touched, and averages that. Later ones start a bucket as soon as it is
full. The last bucket has a flag, by which a rank tells that it touched something else: then all exchange again.
"""

import enum
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch_testing_ext._torch.spmd import at_end_of_backward, outside_dynamo, roots_of_backward

from ..spmd_errors import SPMDError
from .bucket_plan import BucketProgress, agreed_order
from .gradient_buckets import BackwardPlan
from .managed_params import ManagedParam
from .meeting_point import MeetingPoint
from .read_watch import ReadWatch, unmanaged_parameters
from .roster import Roster
from .wire import Wire

# The call of a step.
INSIDE, AFTER = "inside", "after"


class Presence(enum.IntEnum):
    """A rank's part in a backward; ranks exchange it as a number."""

    PRESENT = 0
    ABSENT = 1
    # An error interrupted the backward, or the step before it.
    FAILED = 2


@dataclass
class _Backward:
    """A backward that is running."""

    plan: BackwardPlan | None
    progress: BucketProgress | None
    touched: dict[int, int] = field(default_factory=dict)
    # Touched once more after their bucket had started.
    again: set[int] = field(default_factory=set)
    unexpected: bool = False
    # The function that runs at its end. Autograd drops it if the backward raises an error.
    finisher: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_awaited(self) -> bool:
        """Will autograd call the function at its end?"""
        return self.finisher is not None and self.finisher() is not None

    def finish_by(self, function: Callable[[], None]) -> None:
        """Have autograd call this at the end of the backward, which runs now."""
        self.finisher = weakref.ref(function)
        at_end_of_backward(function)


class Averager:
    """Averages the gradients of the parameters of a roster at the end of each backward."""

    def __init__(self, wire: Wire, meeting: MeetingPoint, watch: ReadWatch) -> None:
        self.wire = wire
        self.meeting = meeting
        self.watch = watch
        self.roster: Roster | None = None
        self.phase = AFTER
        self.turn = 0
        self.backward: _Backward | None = None
        # Parameters with gradients that nothing averages.
        self.strangers: list[torch.Tensor] = []
        self.broken = False

    # -- the call

    def begin(self, roster: Roster) -> None:
        """Begin a call."""
        if roster is not self.roster:
            self._listen_to(roster)
        self.phase = INSIDE
        self.turn = 0
        self.backward = None
        self.broken = False

    def _listen_to(self, roster: Roster) -> None:
        if self.roster is not None:
            for managed in self.roster.params:
                managed.index = -1
        self.roster = roster
        for index, managed in enumerate(roster.params):
            managed.index = index
            managed.listener = self.touch

    def end(self, failed: bool) -> None:
        """End a call. If other ranks may be in a backward that this rank did not run, tell them."""
        assert self.roster is not None
        presence = Presence.FAILED if failed else Presence.ABSENT
        try:
            # An error has interrupted a backward that is still open.
            if self.backward is not None and not self.broken:
                self._close(self.backward, presence)
            while not self.broken and self.roster.plan_of(INSIDE, self.turn) is not None:
                self._close(self._open(), presence)
        finally:
            self.phase = AFTER
            self.turn = 0
            self.backward = None

    # -- the backward

    def touch(self, managed: ManagedParam) -> None:
        """Note that a gradient has been accumulated."""
        backward = self.backward
        if backward is None or not backward.is_awaited:
            if self.wire.world == 1 or not self.wire.is_open():
                return
            backward = self._enter(managed)
        index = managed.index if managed.index >= 0 else self._enlist(managed)
        if index in backward.touched:
            backward.again.add(index)
            return
        backward.touched[index] = 1 + len(backward.touched)
        if backward.progress is None or backward.plan is None:
            return
        if index not in backward.plan.expected:
            backward.unexpected = True
            return
        for number in backward.progress.arrive(index):
            if backward.plan.overlaps:
                with torch.no_grad(), self.watch.pausing():
                    self._start(backward.plan, number, False)

    def _enter(self, managed: ManagedParam) -> _Backward:
        """A backward has begun, or goes on after an error, with the gradient of this parameter."""
        assert self.roster is not None
        backward = self.backward = self.backward or self._open()
        # A function of its own: it lives as long as autograd has it.
        backward.finish_by(functools.partial(self._finish))
        moved = [param for param in self.roster.params if not param.hook_last()]
        if managed in moved:
            # Its other hooks are still to run.
            backward.again.add(managed.index)
        return backward

    def _start(self, plan: BackwardPlan, number: int, flag: bool) -> None:
        """Start a bucket. The first one tells a hash of what the ranks are doing."""
        hash_of_calls = self.meeting.hash(self.turn + 1, self.phase) if number == 0 else 0
        plan.start(self.wire, number, flag, hash_of_calls)

    def _enlist(self, managed: ManagedParam) -> int:
        """Add a parameter that another step manages."""
        assert self.roster is not None
        self.roster.params.append(managed)
        managed.index = len(self.roster.params) - 1
        managed.listener = self.touch
        return managed.index

    def _open(self) -> _Backward:
        assert self.roster is not None
        self.watch.settle()
        plan = self.roster.plan_of(self.phase, self.turn)
        if plan is None or self.roster.opens_with_header:
            self.meeting.arrive()
        progress = None if plan is None else plan.progress()
        return _Backward(plan, progress)

    @outside_dynamo
    def _finish(self) -> None:
        backward = self.backward
        if backward is None or self.roster is None:
            return
        self.strangers += unmanaged_parameters(roots_of_backward(), self.roster.plains)
        self._close(backward, Presence.PRESENT)

    @torch.no_grad()
    def _close(self, backward: _Backward, presence: Presence) -> None:
        """Average the gradients of a backward that is over. If that raises, the call is broken."""
        assert self.roster is not None
        self.backward = None
        self.broken = True
        self.meeting.check()
        with self.watch.pausing():
            if backward.plan is None:
                self._discover(backward, presence)
            else:
                self._average(backward, backward.plan, presence)
        if self.watch.kept:
            # The gradients are averages now.
            self.watch.drop([self.roster.params[index] for index in backward.touched])
        if self.roster.shards:
            self.roster.store.release()
        self.turn += 1
        self.broken = False

    def _average(self, backward: _Backward, plan: BackwardPlan, presence: Presence) -> None:
        """Average by a plan. The last bucket has a flag if this rank has not touched what the plan expects."""
        assert backward.progress is not None
        is_as_expected = (
            presence is Presence.PRESENT
            and not backward.unexpected
            and not backward.again
            and len(backward.touched) == len(plan.expected)
        )
        first = backward.progress.next if plan.overlaps else 0
        last = len(plan.buckets) - 1
        for number in range(first, last + 1):
            self._start(plan, number, flag=number == last and not is_as_expected)
        plan.wait()
        if not plan.buckets[0].hashes_agree(self.wire.world):
            self.meeting.explain()
        if not plan.buckets[-1].flagged():
            plan.write_back()
            return
        self._discover(backward, presence, plan)

    def _discover(self, backward: _Backward, presence: Presence, plan: BackwardPlan | None = None) -> None:
        """Find out what any rank has touched, average it, and remember it. `plan` has been averaged already."""
        roster = self.roster
        assert roster is not None
        if plan is not None or self.turn or self.phase == AFTER:
            self.meeting.confirm(self.turn + 1, len(roster.params), self.phase, together=plan is not None)
        touched, again, presences = self._exchange(backward, presence)
        self._compare_presence(presences)
        order = agreed_order(touched)
        done: set[int] = set()
        if plan is not None:
            done = set(plan.expected).intersection(order) - again
            plan.write_back(lambda managed: managed.index in done)
        rest = roster.store.plan([index for index in order if index not in done])
        for number in range(len(rest.buckets)):
            rest.start(self.wire, number, False, 0)
        rest.wait()
        rest.write_back()
        if not order:
            roster.forget_after(self.phase, self.turn)
            return
        remembered = roster.store.plan(order)
        remembered.overlaps = not again and (plan is None or plan.overlaps)
        roster.remember(self.phase, self.turn, remembered)

    def _exchange(self, backward: _Backward, presence: Presence) -> tuple[list[list[int]], set[int], list[int]]:
        """Tell all what this rank has touched. Returns that of each rank, what any touched twice, and presences."""
        assert self.roster is not None
        count = len(self.roster.params)
        mine = [backward.touched.get(index, 0) for index in range(count)]
        twice = [int(index in backward.again) for index in range(count)]
        device = self.meeting.device
        rows = self.wire.gather_numbers(torch.tensor([*mine, *twice, presence.value], device=device))()
        touched = [row[:count] for row in rows]
        again = {index for row in rows for index in range(count) if row[count + index]}
        presences = [row[-1] for row in rows]
        return touched, again, presences

    def _compare_presence(self, presences: list[int]) -> None:
        some_failed = Presence.FAILED in presences
        if some_failed and presences[self.wire.rank] != Presence.FAILED:
            failed = presences.index(Presence.FAILED)
            raise SPMDError(
                f"The step raised an error on rank {failed}, but not on rank {self.wire.rank}.",
                remedy="See the error of that rank. Let all ranks raise, or none of them.",
            )
        if len(set(presences)) > 1 and not some_failed:
            present = [rank for rank, presence in enumerate(presences) if presence == Presence.PRESENT]
            raise SPMDError(
                f"Backward {self.turn + 1} of this call ran on the ranks {present}, but not on the others.",
                remedy="Call backward() equally often on every rank, with a loss of 0 if there is nothing to learn.",
            )
