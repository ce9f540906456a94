"""Averages gradients in every backward: hooks fill buckets, and the backward's end waits for them."""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._torch.training import at_end_of_backward, outside_dynamo, run_hook_last

from .agreement import CallPlace, StepMeeting
from .buckets import BucketPlan, agreed_order, is_kept
from .modes import SPMDError
from .resting_tensor import AwayParameter


@dataclass
class StepHistory:
    """The calls of one step so far."""

    # -1: the backwards outside of calls.
    number: int = -1
    calls: int = 0
    # The plans of backwards, by their number in a call.
    plans: dict[int, BucketPlan] = field(default_factory=dict)
    trained: bool = False


@dataclass
class Managed:
    """A parameter whose gradients are averaged."""

    param: "weakref.ref[torch.Tensor]"
    is_sharded: bool
    hook: Any = None


@dataclass
class _Backward:
    """A backward that is running, or one that an error interrupted."""

    plan: BucketPlan | None
    # The parameters that it has reached, with their place, and those that got more after their bucket had left.
    reached: dict[int, int] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    # The function that runs at its end. Autograd drops it if the backward raises an error.
    finisher: "weakref.ref[Callable[[], None]] | None" = None

    @property
    def is_awaited(self) -> bool:
        """Whether autograd will call the function at its end."""
        return self.finisher is not None and self.finisher() is not None

    def finish_by(self, function: Callable[[], None]) -> None:
        """Have autograd call this at the end of the backward, which runs now."""
        self.finisher = weakref.ref(function)
        at_end_of_backward(function)


class Averager:
    """The parameters whose gradients are averaged, and the backward that runs."""

    def __init__(self, meeting: StepMeeting) -> None:
        self.meeting = meeting
        self.managed: list[Managed] = []
        # The places of parameters, by `id`.
        self._index: dict[int, int] = {}
        # The sharded parameters whose gradients stay where they are: sparse ones, and those that something keeps.
        self.kept: set[int] = set()
        self._outside = StepHistory()
        self.history = self._outside
        self.limit: int | None = None
        # The number of backwards of the call so far.
        self.turn = 0
        self.backward: _Backward | None = None

    def index_of(self, param: Any) -> int | None:
        """The number of a parameter, the same on all ranks. None if it is not averaged."""
        index = self._index.get(id(param))
        return index if index is not None and self.managed[index].param() is param else None

    def of(self, param: Any) -> Managed | None:
        """The facts about a parameter."""
        index = self.index_of(param)
        return None if index is None else self.managed[index]

    def add(self, param: torch.Tensor, is_sharded: bool) -> None:
        """Average the gradients of a parameter from now on."""
        if self.index_of(param) is not None:
            return
        managed = Managed(weakref.ref(param), is_sharded)
        self._index[id(param)] = len(self.managed)
        self.managed.append(managed)
        if self.meeting.world > 1 and (param.is_floating_point() or param.is_complex()):
            trains = param.requires_grad
            # A frozen one cannot get a hook, and may be trained later.
            param.requires_grad_(True)
            managed.hook = param.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            param.requires_grad_(trains)

    def average_existing(self, params: Sequence[torch.Tensor]) -> None:
        """Average the gradients that parameters have before the first call, as those of a backward."""
        indices = [index for param in params if (index := self.index_of(param)) is not None and param.grad is not None]
        reached = {index: place for place, index in enumerate(indices, 1)}
        self._discover(_Backward(None, reached, {*reached}), None, {*reached})

    def _param(self, index: int) -> torch.Tensor:
        param = self.managed[index].param()
        assert param is not None
        return param

    def begin(self, history: StepHistory, limit: int | None) -> None:
        """Begin a call of a step."""
        self.history, self.limit, self.turn, self.backward = history, limit, 0, None

    def end(self) -> None:
        """End a call: average what an interrupted backward has left."""
        if self.backward is not None:
            self.finish()
        self.history.trained |= self.turn > 0

    def leave(self) -> None:
        """Average the backwards that follow as those outside of calls."""
        self.history, self.turn, self.backward = self._outside, 0, None

    def fail(self) -> None:
        """Tell the other ranks, when they meet, that this one has left the call."""
        backward, self.backward = self.backward, None
        if self.meeting.is_known or self.meeting.world == 1:
            return
        try:
            self.meeting.check()
            if backward is not None and backward.plan is not None:
                # They wait for its buckets. The flag makes them meet after it.
                backward.plan.finish(self.meeting, True)
            self.meeting.send(CallPlace.FAILED)
        except (SPMDError, RuntimeError):
            # The caller raises the first error.
            return

    @outside_dynamo
    def _arrived(self, param: torch.Tensor) -> None:
        index = self.index_of(param)
        # A copy of a parameter has its hook, too.
        if index is None or not self.meeting.is_open():
            return
        self._admit(param)
        backward = self.backward
        if backward is None or not backward.is_awaited:
            backward = self._enter(index)
        if index in backward.reached or (self.managed[index].is_sharded and is_kept(param.grad)):
            backward.again.add(index)
        if index in backward.reached:
            return
        backward.reached[index] = len(backward.reached) + 1
        if backward.plan is not None and index in backward.plan.expected and index not in backward.again:
            backward.plan.arrive(index, self.meeting)

    def _admit(self, param: torch.Tensor) -> None:
        if type(param) is AwayParameter:
            raise backward_after_call()
        if param.grad is not None and param.grad.requires_grad:
            raise SPMDError(
                "backward(create_graph=True) leaves gradients with a graph, which cannot be averaged.",
                remedy="Use torch.autograd.grad(create_graph=True), and call backward() without it.",
            )

    def _enter(self, index: int) -> _Backward:
        """A backward has begun, or goes on after an error, with the gradient of this parameter."""
        backward = self.backward
        if backward is None:
            plan = self.history.plans.get(self.turn)
            if plan is not None and not plan.fits():
                plan = None
            if plan is not None:
                plan.begin()
            backward = self.backward = _Backward(plan)
            self.meeting.send(CallPlace.BACKWARD, self.turn, 0 if plan is None else plan.hash)
        # A function of its own: it lives as long as autograd has it.
        backward.finish_by(functools.partial(self.finish))
        for number, managed in enumerate(self.managed):
            param = managed.param()
            if param is None or managed.hook is None or type(param) is AwayParameter:
                continue
            if not run_hook_last(param, managed.hook) and number == index:
                # Hooks that were registered after ours run after it this time.
                backward.again.add(index)
        return backward

    @outside_dynamo
    @torch.no_grad()
    def finish(self) -> None:
        """Average what any rank has reached, at the end of a backward."""
        backward, self.backward = self.backward, None
        if backward is None:
            return
        self.meeting.check()
        self._refuse_shared(backward.reached)
        plan = backward.plan
        left = {index for index in backward.reached if plan is None or index not in plan.expected} | backward.again
        if plan is not None:
            is_as_expected = not left and len(backward.reached) == len(plan.expected)
            if not plan.finish(self.meeting, not is_as_expected):
                plan.write_back(plan.expected, ())
                self._next()
                return
        # A rank that has failed is not in the exchange.
        self.meeting.meet(CallPlace.BACKWARD, self.turn)
        self._discover(backward, plan, left)
        self._next()

    def _next(self) -> None:
        self.turn += 0 if self.history is self._outside else 1

    def _discover(self, backward: _Backward, plan: BucketPlan | None, left: set[int]) -> None:
        """Tell all ranks what this one has reached, average what no bucket has taken, and expect it from now on."""
        rows = self._exchange(backward, left)
        order = agreed_order([row[0] for row in rows])
        self.kept |= {index for row in rows for index, stays in enumerate(row[2]) if stays}
        lefts = {index for row in rows for index, is_left in enumerate(row[1]) if is_left}
        if plan is not None:
            plan.write_back({*order}, lefts)
        rest = self._plan([index for index in order if index in lefts])
        if rest.buckets:
            rest.begin()
            rest.finish(self.meeting, False)
            rest.write_back(rest.expected, ())
        self.history.plans.pop(self.turn, None)
        if order and not any(any(row[3]) for row in rows):
            self.history.plans[self.turn] = self._plan(order)

    def _exchange(self, backward: _Backward, left: set[int]) -> list[list[list[int]]]:
        """For each rank and parameter: its place, is something left, is it kept, has its bucket left early."""
        kept = {index for index in backward.reached if is_kept(self._param(index).grad)}
        sets = left, kept, backward.again
        count = range(len(self.managed))
        numbers = [[backward.reached.get(index, 0) for index in count]]
        numbers += [[int(index in some) for index in count] for some in sets]
        mine = torch.tensor(numbers, device=self.meeting.device)
        rows = [torch.empty_like(mine) for _ in range(self.meeting.world)]
        dist.all_gather(rows, mine, group=self.meeting.group)
        return [row.tolist() for row in rows]

    def _plan(self, order: Sequence[int]) -> BucketPlan:
        params = [self._param(index) for index in order]
        frees = [self.managed[index].is_sharded and index not in self.kept for index in order]
        return BucketPlan(order, params, frees, self.limit)

    def _refuse_shared(self, reached: Iterable[int]) -> None:
        """Refuse two parameters with one gradient in memory: their sum, not each of them, was averaged twice."""
        owners: dict[int, int] = {}
        for index in reached:
            grad = self._param(index).grad
            if grad is None or grad.layout is not torch.strided or not grad.numel():
                continue
            if owners.setdefault(grad.data_ptr(), index) != index:
                raise SPMDError(
                    "The gradients of two parameters are one tensor, which a backward would average twice.",
                    remedy="Set one of them to a clone, or to None, before backward().",
                )


def backward_after_call() -> SPMDError:
    """The error of a backward that reaches a parameter of a call after it."""
    return SPMDError(
        "backward() was called on a result of the step after the step had returned.",
        remedy="Call backward() in the step.",
    )
