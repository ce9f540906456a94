"""Averages gradients during every backward.

Hooks on the parameters report what a backward touches. The first backward of a kind (the n-th one of a call of a step)
ends with an exchange of what each rank has touched, and averages that. Later ones start a bucket as soon as it is
full. The last bucket has a flag, by which a rank tells that it touched something else: then all exchange again.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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

INSIDE, AFTER = "inside", "after"  # the call of a step
PRESENT, ABSENT, FAILED = 0, 1, 2  # a rank in a backward


@dataclass
class _Backward:
    """A backward that is running."""

    plan: BackwardPlan | None
    progress: BucketProgress | None
    touched: dict[int, int] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)  # touched once more after their bucket had started
    unexpected: bool = False
    end: Callable[[], Any] = lambda: None  # the function that runs at its end, alive unless it raised an error


class Averager:
    """Averages the gradients of the parameters of a roster at the end of each backward."""

    def __init__(self, wire: Wire, meeting: MeetingPoint, watch: ReadWatch) -> None:
        self.wire, self.meeting, self.watch = wire, meeting, watch
        self.roster: Roster | None = None
        self.phase, self.turn = AFTER, 0
        self.backward: _Backward | None = None
        self.strangers: list[torch.Tensor] = []  # parameters with gradients that nothing averages
        self.broken = False

    # -- the call

    def begin(self, roster: Roster) -> None:
        if roster is not self.roster:
            if self.roster is not None:
                for managed in self.roster.params:
                    managed.index = -1
            self.roster = roster
            for index, managed in enumerate(roster.params):
                managed.index, managed.listener = index, self.touch
        self.phase, self.turn, self.backward, self.broken = INSIDE, 0, None, False

    def end(self, failed: bool) -> None:
        """End a call. If other ranks may be in a backward that this rank did not run, tell them."""
        assert self.roster is not None
        try:
            if self.backward is not None and not self.broken:  # an error interrupted it
                self._close(self.backward, ABSENT + failed)
            while not self.broken and self.roster.plan_of(INSIDE, self.turn) is not None:
                self._close(self._open(), ABSENT + failed)
        finally:
            self.phase, self.turn, self.backward = AFTER, 0, None

    # -- the backward

    def touch(self, managed: ManagedParam) -> None:
        """Note that a gradient has been accumulated."""
        backward = self.backward
        if backward is None or backward.end() is None:
            if self.wire.world == 1 or not self.wire.is_open():
                return
            backward = self.backward = backward or self._open()
            end = functools.partial(self._finish)
            backward.end = weakref.ref(end)
            at_end_of_backward(end)
            moved = [each for each in self.roster.params if not each.hook_last()]  # type: ignore[union-attr]
            if managed in moved:  # its other hooks are still to run
                backward.again.add(managed.index)
        index = managed.index
        if index < 0:
            index = self._enlist(managed)
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

    def _start(self, plan: BackwardPlan, number: int, flag: bool) -> None:
        plan.start(self.wire, number, flag, 0 if number else self.meeting.hash(self.turn + 1, self.phase))

    def _enlist(self, managed: ManagedParam) -> int:
        """Add a parameter that another step manages."""
        assert self.roster is not None
        self.roster.params.append(managed)
        managed.index, managed.listener = len(self.roster.params) - 1, self.touch
        return managed.index

    def _open(self) -> _Backward:
        assert self.roster is not None
        self.watch.settle()
        plan = self.roster.plan_of(self.phase, self.turn)
        if plan is None or self.roster.opens_with_header:
            self.meeting.arrive()
        return _Backward(plan, None if plan is None else plan.progress())

    @outside_dynamo
    def _finish(self) -> None:
        backward = self.backward
        if backward is None or self.roster is None:
            return
        self.strangers += unmanaged_parameters(roots_of_backward(), self.roster.plains)
        self._close(backward, PRESENT)

    @torch.no_grad()
    def _close(self, backward: _Backward, presence: int) -> None:
        assert self.roster is not None
        self.backward, self.broken = None, True
        self.meeting.check()
        with self.watch.pausing():
            if backward.plan is None:
                self._discover(backward, presence)
            else:
                self._average(backward, backward.plan, presence)
        if self.watch.kept:  # they are averages now
            self.watch.drop([self.roster.params[index] for index in backward.touched])
        if self.roster.shards:
            self.roster.store.release()
        self.turn += 1
        self.broken = False

    def _average(self, backward: _Backward, plan: BackwardPlan, presence: int) -> None:
        assert backward.progress is not None
        same = presence == PRESENT and not backward.unexpected and not backward.again
        same = same and len(backward.touched) == len(plan.expected)
        first = backward.progress.next if plan.overlaps else 0
        for number in range(first, len(plan.buckets)):
            self._start(plan, number, not same and number == len(plan.buckets) - 1)
        plan.wait()
        if not plan.buckets[0].hashes_agree(self.wire.world):
            self.meeting.explain()
        if not plan.buckets[-1].flagged():
            plan.write_back()
            return
        self._discover(backward, presence, plan)

    def _discover(self, backward: _Backward, presence: int, plan: BackwardPlan | None = None) -> None:
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
        remembered = roster.store.plan(order) if order else None
        if remembered is not None:
            remembered.overlaps = not again and (plan is None or plan.overlaps)
            roster.remember(self.phase, self.turn, remembered)
        else:
            roster.forget_after(self.phase, self.turn)

    def _exchange(self, backward: _Backward, presence: int) -> tuple[list[list[int]], set[int], list[int]]:
        """Tell all what this rank has touched. Returns that of each rank, what any touched twice, and presences."""
        assert self.roster is not None
        count = len(self.roster.params)
        mine = [backward.touched.get(index, 0) for index in range(count)]
        twice = [int(index in backward.again) for index in range(count)]
        device = self.meeting.device
        rows = self.wire.gather_numbers(torch.tensor([*mine, *twice, presence], device=device))()
        again = {index for row in rows for index in range(count) if row[count + index]}
        return [row[:count] for row in rows], again, [row[-1] for row in rows]

    def _compare_presence(self, presences: list[int]) -> None:
        if FAILED in presences and presences[self.wire.rank] != FAILED:
            raise SPMDError(
                f"The step raised an error on rank {presences.index(FAILED)}, but not on rank {self.wire.rank}.",
                remedy="See the error of that rank. Let all ranks raise, or none of them.",
            )
        if len(set(presences)) > 1 and FAILED not in presences:
            here = [rank for rank, presence in enumerate(presences) if presence == PRESENT]
            raise SPMDError(
                f"Backward {self.turn + 1} of this call ran on the ranks {here}, but not on the others.",
                remedy="Call backward() equally often on every rank, with a loss of 0 if there is nothing to learn.",
            )
