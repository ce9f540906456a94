"""The engine of one group of ranks: what happens before and after the user's Python in each call of a step."""

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import tree
from torch_testing_ext._utils.rank_traces import mark

from ..parallel_modes import DataParallel
from ..spmd_errors import SPMDError
from .admission import admit_held, admit_hooks
from .averaging import Averager
from .checksum import Checksum
from .engine_report import EngineReport, report_of
from .gradient_buckets import BackwardPlan
from .meeting_point import CallHeader, MeetingPoint
from .read_watch import UseWatch
from .resting_state import RestingState
from .roster import EARLY, ParamSlot, Roster, registered, tensors_of
from .roster_maker import RosterMaker
from .state_finder import FoundState, find_state
from .wire import Wire


class StepHistory:
    """The calls of one compiled step so far."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0
        self.rosters: list[Roster] = []  # the last one is that of the last call
        self.gathered: dict[str, int] = {}

    def roster_of(self, tensors: list[torch.Tensor], optimizers: list[Optimizer]) -> Roster | None:
        return next((r for r in reversed(self.rosters) if r.matches(tensors, optimizers)), None)

    def add(self, roster: Roster) -> None:
        if not self.rosters or self.rosters[-1] is not roster:
            self.rosters = [*[known for known in self.rosters if known is not roster][-3:], roster]


class CallStack:
    """The steps that run: one, and those that it calls."""

    def __init__(self) -> None:
        self._running: list[Any] = []
        self._thread = 0

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def outermost(self) -> Any:
        return self._running[0]

    @contextmanager
    def entered(self, step: Any) -> Iterator[None]:
        """Enter a step. Refuses other threads, and a step that calls itself."""
        thread = threading.get_ident()
        if self._running and thread != self._thread:
            raise SPMDError(
                "The step was called while another thread is in a call.",
                remedy="Call compiled steps from one thread at a time.",
            )
        if step in self._running:
            raise SPMDError("The step calls itself.", remedy="Let it call the function that is not compiled.")
        self._thread = thread
        self._running.append(step)
        try:
            yield
        finally:
            self._running.pop()


class StateEngine:
    """Makes the state of steps data parallel, for the ranks of the default group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.wire = Wire(group)
        self.meeting = MeetingPoint(self.wire)
        self.resting = RestingState(self.wire, self.meeting)
        self.averager = Averager(self.wire, self.meeting, self.resting.watch)
        self.maker = RosterMaker(self.wire, self.meeting)
        self.checksum = Checksum()
        self.records: weakref.WeakKeyDictionary[Any, StepHistory] = weakref.WeakKeyDictionary()
        self.count = 0
        self.stack = CallStack()

    def call(self, step: Any, mode: DataParallel, args: Any, kwargs: Any) -> Any:
        """Run a step, with its state made data parallel. A step that another one calls is a part of that."""
        is_outermost = not self.stack
        with self.stack.entered(step):
            return self.run(step, mode, args, kwargs) if is_outermost else step.function(*args, **kwargs)

    def run(self, step: Any, mode: DataParallel, args: Any, kwargs: Any) -> Any:
        with torch.inference_mode(False):
            roster, found = self._enter(step, mode, args, kwargs)
        failed = True
        try:
            result = self._run_python(step, roster, args, kwargs)
            failed = False
        finally:
            with torch.inference_mode(False):
                self._leave(roster, found, failed)
        if roster.rests:
            _refuse_later_backward(result)
        return result

    def _run_python(self, step: Any, roster: Roster, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return _run_without_grad(step, args, kwargs)
        if any(managed.plain.requires_grad for managed in roster.params):
            return step.function(*args, **kwargs)
        with UseWatch() as watch:
            result = step.function(*args, **kwargs)
        watch.close()
        self.averager.strangers += watch.reached
        return result

    def report(self, step: Any) -> EngineReport:
        record = self.records.get(step)
        if record is None or not record.rosters:
            raise SPMDError("The step has not been called yet.", remedy="Call it once.")
        return report_of(step.name, self.wire.world, record.calls, record.rosters[-1], record.gathered)

    # -- before the step

    def _enter(self, step: Any, mode: DataParallel, args: Any, kwargs: Any) -> tuple[Roster, FoundState]:
        """Begin a call: find its state, and meet the other ranks."""
        record = self.history_of(step)
        found = find_state(step.function, args, kwargs)
        opening = record.rosters[-1].opening if record.rosters else None  # its first bucket opens the call
        may_train = torch.is_grad_enabled() and record.calls > 0
        is_early = record.calls < EARLY and (opening is not None or may_train)
        checksum = functools.partial(self._checksum, record)
        try:
            roster, slots = self.enrol(record, mode, found, None if is_early else opening, checksum)
        finally:
            record.calls += 1
        self.averager.begin(roster)
        if is_early:
            self.meeting.meet()
        self._share_buffers(roster, found)
        if roster.rests:
            self.meeting.meet()
            roster.reads |= self.meeting.reads
            self.resting.enter(roster, slots)
        self._hook(roster)
        return roster, found

    def enrol(
        self,
        record: StepHistory,
        mode: DataParallel,
        found: FoundState,
        opening: BackwardPlan | None = None,
        checksum: Callable[[], torch.Tensor | None] = lambda: None,
        check: Callable[[list[torch.Tensor], int], None] = lambda tensors, new: None,
    ) -> tuple[Roster, list[ParamSlot]]:
        """Find the roster of the state that a call has found, or make it. Returns the state's slots, too.

        `check` may refuse the call on all ranks: it gets the parameters, and how many things are new.
        """
        slots, buffers = registered(found.modules)
        tensors = tensors_of(slots, found.optimizers)
        roster = record.roster_of(tensors, found.optimizers)
        new = 0 if roster is not None else self.maker.count_new(tensors, found.optimizers)
        device = next((tensor.device for tensor in tensors if not tensor.is_meta), self.meeting.device)
        reads = 0 if roster is None else roster.reads
        header = CallHeader(record.number, record.calls, 0, new, len(tensors), reads=reads)
        self.meeting.begin(header, device, checksum, opening)
        try:
            plan = None if roster is not None else self.maker.admit(mode, found, slots, buffers, tensors)
            if roster is None or roster.rests:
                admit_hooks(tensors)
                admit_held(found.tensors)
            check(tensors, new)
        except Exception as error:
            self.meeting.refuse(error)
            raise
        if plan is not None:
            roster = self.maker.make(plan, new > 0)
        assert roster is not None
        roster.buffers = buffers
        record.add(roster)
        return roster, slots

    def history_of(self, step: Any) -> StepHistory:
        if step not in self.records:
            self.records[step] = StepHistory(self.count)
            self.count += 1
        return self.records[step]

    def forget(self, roster: Roster, history: StepHistory, optimizers: Iterable[Optimizer]) -> None:
        """Forget what a call that is undone has taken over."""
        history.rosters = [known for known in history.rosters if known is not roster]
        self.maker.optimizers.difference_update(optimizers)
        if self.averager.roster is roster:
            self.averager.roster = None

    def _checksum(self, record: StepHistory) -> torch.Tensor | None:
        roster = self.averager.roster
        assert roster is not None
        found = self.checksum.of([managed.plain for managed in roster.params if not managed.sharded], record.calls)
        sums = [*roster.take_sums(), *([] if found is None else [found])]
        return sum(sums[1:], start=sums[0]) if sums else None

    def _hook(self, roster: Roster) -> None:
        if self.wire.world > 1:
            for managed in roster.params:
                plain = managed.plain
                has_gradients = (plain.is_floating_point() or plain.is_complex()) and not plain.is_inference()
                if managed.hooked is None and has_gradients:
                    managed.hook()

    def _share_buffers(self, roster: Roster, found: FoundState) -> None:
        """Give all ranks rank 0's buffers before a step that trains, as DDP does."""
        trains = roster.plan_of("inside", 0) is not None or any(module.training for module in found.modules)
        roster.shared = 0
        if roster.buffers and self.wire.world > 1 and trains:
            self.meeting.meet()
            roster.shared = sum(each.nbytes for each in roster.buffers if each.layout is torch.strided)
            with torch.no_grad(), mark("buffers of rank 0", roster.shared):
                self.wire.broadcast(roster.buffers, self.meeting.device)

    # -- after the step

    def _leave(self, roster: Roster, found: FoundState, failed: bool) -> None:
        try:
            self.averager.end(failed)
        except BaseException:
            failed = True
            raise
        finally:
            if roster.rests:
                self.history_of(self.stack.outermost).gathered = self.resting.bytes
                self.resting.leave(found.modules, failed)
                if failed:
                    roster.take_sums()  # ranks may have failed at different points
                roster.store.release()
        self._name_strangers(failed)

    def _name_strangers(self, failed: bool) -> None:
        """Raise an error for parameters that a backward has reached, and that live on, if nothing averages them."""
        strangers, self.averager.strangers = self.averager.strangers, []
        if failed or not strangers:
            return
        alive = [weakref.ref(stranger) for stranger in strangers]
        shapes = [tuple(stranger.shape) for stranger in strangers]
        strangers.clear()
        left = [shape for shape, stranger in zip(shapes, alive, strict=True) if stranger() is not None]
        if left:
            raise SPMDError(
                f"A backward of the step reached parameters that no module or optimizer holds which the step names: "
                f"of shapes {', '.join(map(str, left[:4]))}. Their gradients were not averaged.",
                remedy="Pass the module that owns them to the step, or hold it in a variable that the step names. "
                "If they are the rank's own, return loss.detach(), which does not keep them.",
            )


def _run_without_grad(step: Any, args: Any, kwargs: Any) -> Any:
    """Run a step that may only evaluate."""
    try:
        return step.function(*args, **kwargs)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise SPMDError(
            "The step was called under no_grad or inference_mode, but it calls backward().",
            remedy="Call it outside of that context.",
        ) from error


def _refuse_later_backward(result: Any) -> None:
    """Let a backward of the caller fail: it needs plain, whole weights, and model and optimizers hold others."""

    def refuse(_: torch.Tensor) -> None:
        raise SPMDError(
            "backward() was called on a result of the step after the step had returned.",
            remedy='Call backward() in the step, or use DataParallel("replicate", between="plain").',
        )

    for leaf in tree().tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            leaf.register_hook(refuse)  # type: ignore[no-untyped-call]


@functools.cache
def _let_gloo_finish() -> None:
    """Release the GIL before the interpreter exits, for a gloo thread that waits for it to free a tensor."""
    atexit.register(time.sleep, 0.002)


_engines: weakref.WeakKeyDictionary[Any, StateEngine] = weakref.WeakKeyDictionary()


def current_engine() -> StateEngine:
    """The engine of the default group."""
    if not dist.is_initialized():
        raise SPMDError("There is no process group.", remedy="Call torch.distributed.init_process_group first.")
    group = dist.group.WORLD
    if group not in _engines:
        _engines[group] = StateEngine(group)  # type: ignore[arg-type]
        _let_gloo_finish()
    return _engines[group]
