"""The engine of one group of ranks: what happens before and after the user's Python in each call of a step."""

import atexit
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.training import below_torch_function

from . import admission
from .admission import Named
from .agreement import EARLY, CallPlace, StepMeeting, in_turns
from .averaging import Averager, StepHistory
from .modes import DataParallel, SPMDError, explained
from .resting import Resting
from .row_updates import RowUpdates
from .shared_values import broadcast, make_plain, state_tensors
from .state_finding import FoundState, find_state, named_state


class StepEngine:
    """Makes the state of steps data parallel, for the ranks of the default group."""

    def __init__(self, group: Any) -> None:
        self.meeting = StepMeeting(group)
        self.averager = Averager(self.meeting)
        self.resting = Resting(self.meeting)
        self.updates = RowUpdates(self.averager, self.resting)
        self._histories: weakref.WeakKeyDictionary[Any, StepHistory] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # The steps that run: one, and those that it calls.
        self._running: list[Any] = []
        self._thread = 0

    def call(self, step: Any, args: Any, kwargs: Any) -> Any:
        """Call a step. One that another step calls is part of that call."""
        if self._running and threading.get_ident() != self._thread:
            raise SPMDError(
                "The step was called while another thread is in a call.",
                remedy="Call compiled steps from one thread at a time.",
            )
        if step in self._running:
            raise SPMDError("The step calls itself.", remedy="Let it call the function that is not compiled.")
        self._thread = threading.get_ident()
        self._running.append(step)
        try:
            return step.function(*args, **kwargs) if len(self._running) > 1 else self._call(step, args, kwargs)
        finally:
            self._running.pop()

    def _call(self, step: Any, args: Any, kwargs: Any) -> Any:
        found = find_state(step.function, args, kwargs)
        history = self._history(step)
        self.meeting.begin(history.number, history.calls)
        self.averager.begin(history, step.mode.bucket_bytes)
        history.calls += 1
        try:
            with torch.inference_mode(False), below_torch_function():
                self._enter(step, history, found)
            result = step.function(*args, **kwargs)
            with torch.inference_mode(False), below_torch_function():
                self._end(found)
        except BaseException as error:
            self.averager.fail()
            with torch.inference_mode(False), below_torch_function():
                self._leave(found)
            clear = explained(error)
            if clear is error:
                raise
            raise clear from error
        with torch.inference_mode(False), below_torch_function():
            self._leave(found)
        return result

    def _history(self, step: Any) -> StepHistory:
        if step not in self._histories:
            self._histories[step] = StepHistory(next(self._numbers))
        return self._histories[step]

    def _enter(self, step: Any, history: StepHistory, found: FoundState) -> None:
        """Find the state of a call, meet the other ranks, and give it its values."""
        admission.admit_modules(found.modules, found.optimizers)
        params, buffers = named_state(found)
        for name, param in params:
            if isinstance(param, DTensor):
                admission.admit_distributed(name, param, self.meeting.world)
        params = self.resting.enter(found, params)
        unmanaged = [(name, param) for name, param in params if self.averager.of(param) is None]
        # The others of these are DTensors that the program has made, of rows that all ranks have.
        fresh = [(name, param) for name, param in unmanaged if id(param) not in self.resting.pairs]
        optimizers = [optimizer for optimizer in found.optimizers if optimizer not in self._optimizers]
        # By `id`: whether a parameter of a module has rows.
        members = {
            id(param): param.dim() > 0 and param.numel() > 0 for root in found.modules for param in root.parameters()
        }
        self._admit(step.mode, found, params, buffers, fresh, members)
        meeting = self.meeting
        meeting.params, meeting.new = len(params), len(unmanaged) + len(optimizers)
        known = [(param, self.averager.of(param)) for _, param in params]
        replicated = [param for param, managed in known if managed is not None and not managed.is_sharded]
        meeting.watched = in_turns(replicated, history.calls)
        is_new = bool(unmanaged or optimizers)
        trains = torch.is_grad_enabled() and (history.trained or any(module.training for module in found.modules))
        shares = trains and bool(buffers)
        if is_new or shares or self.resting.pairs or (trains and history.calls <= EARLY):
            meeting.device = self._device(params)
            meeting.meet(CallPlace.START, about=self.resting.about())
        if is_new:
            self._compare(params, buffers, optimizers)
        self.resting.fill()
        self.updates.enter(found.optimizers)
        if is_new:
            self._take_over(step, members, fresh, buffers, optimizers)
        if shares:
            broadcast(meeting, [buffer for _, buffer in buffers])

    def _device(self, params: Sequence[Named]) -> torch.device:
        """The device of headers."""
        if dist.get_backend(self.meeting.group) == "gloo" or not params:
            return torch.device("cpu")
        return params[0][1].device

    def _admit(
        self,
        mode: DataParallel,
        found: FoundState,
        params: Sequence[Named],
        buffers: Sequence[Named],
        fresh: Sequence[Named],
        members: Mapping[int, bool],
    ) -> None:
        """Raise an error if the state cannot be made data parallel."""
        admission.admit_tensors([*fresh, *buffers])
        for name, param in params:
            pair = self.resting.pairs.get(id(param))
            if members.get(id(param)) and (pair is not None or self.averager.of(param) is not None):
                admission.admit_style(name, pair is not None and pair.rows is not None, mode.parallel_style)
        if mode.parallel_style == "fully_shard" and fresh:
            kept = [("a tensor of the step", tensor) for tensor in found.tensors]
            admission.admit_sharing(fresh, [*params, *buffers, *kept])

    def _compare(self, params: Sequence[Named], buffers: Sequence[Named], optimizers: Sequence[Optimizer]) -> None:
        """Let the ranks agree on what is new."""
        if self.meeting.world > 1:
            of_ranks = self.meeting.objects([*admission.facts_of(params, buffers, optimizers)])
            self.meeting.is_known = True
            admission.compare_facts(of_ranks)
            self.meeting.is_known = False

    @torch.no_grad()
    def _take_over(
        self,
        step: Any,
        members: Mapping[int, bool],
        fresh: Sequence[Named],
        buffers: Sequence[Named],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Give all ranks rank 0's values, and manage what is new."""
        meeting, new = self.meeting, [param for _, param in fresh]
        make_plain(optimizers)
        if meeting.world > 1:
            states = state_tensors(optimizers)
            broadcast(meeting, [*new, *(buffer for _, buffer in buffers), *states])
        for name, param in fresh:
            is_sharded = step.mode.parallel_style == "fully_shard" and members.get(id(param), False)
            if is_sharded or (step.rests and id(param) in members):
                self.resting.take_over(name, param, is_sharded)
            self.averager.add(param, is_sharded)
        for pair in self.resting.pairs.values():
            self.averager.add(pair.plain, pair.rows is not None)
        if meeting.world > 1:
            self.averager.average_existing(new)
        self._optimizers.update(optimizers)
        for optimizer in optimizers:
            self.updates.watch(optimizer)

    def _end(self, found: FoundState) -> None:
        """End a call that has succeeded."""
        self.averager.end()
        self.meeting.check()
        sharded = [pair for pair in self.resting.pairs.values() if pair.rows is not None]
        if sharded:
            self.updates.meet(CallPlace.END, sharded, found.optimizers)

    def _leave(self, found: FoundState) -> None:
        """Give model and optimizers their form between calls, also after an error."""
        self.updates.restore()
        self.updates.leave(found.optimizers)
        self.resting.leave(found)
        self.averager.leave()
        self.meeting.end()


@functools.cache
def _let_gloo_finish() -> None:
    """Release the GIL before the interpreter exits, for a gloo thread that waits for it to free a tensor."""
    atexit.register(time.sleep, 0.002)


_engines: weakref.WeakKeyDictionary[Any, StepEngine] = weakref.WeakKeyDictionary()


def current_engine() -> StepEngine:
    """The engine of the default group."""
    if not dist.is_initialized():
        raise SPMDError("There is no process group.", remedy="Call torch.distributed.init_process_group first.")
    group = dist.group.WORLD
    if group not in _engines:
        _engines[group] = StepEngine(group)
        _let_gloo_finish()
    return _engines[group]
