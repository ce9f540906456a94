"""The engine of one group of ranks: what happens before and after the user's Python in each call of a step."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..parallel_modes import DataParallel
from ..param_layout import Layout
from ..spmd_errors import SPMDError
from .admission import admit_modules, admit_tensor
from .averaging import Averager
from .call_header import CallHeader
from .checksum import Checksum
from .first_agreement import compare_facts, facts_of, state_tensors
from .gradient_buckets import BucketStore
from .managed_params import ManagedParam, manage, managed_by
from .meeting_point import MeetingPoint
from .roster import ParamSlot, Roster, registered, slot_names, tensors_of
from .state_finder import FoundState, find_state
from .wire import Wire


class StepRecord:
    """What the engine remembers of one compiled step."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0
        self.rosters: list[Roster] = []

    def roster_of(self, tensors: list[torch.Tensor], optimizers: list[Optimizer]) -> Roster | None:
        return next((r for r in reversed(self.rosters) if r.matches(tensors, optimizers)), None)

    def add(self, roster: Roster) -> None:
        self.rosters = [*self.rosters[-3:], roster]


class Engine:
    """Makes the state of steps data parallel, for the ranks of the default group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.wire = Wire(group)
        self.meeting = MeetingPoint(self.wire)
        self.averager = Averager(self.wire, self.meeting)
        self.checksum = Checksum()
        self.steps: weakref.WeakKeyDictionary[Any, StepRecord] = weakref.WeakKeyDictionary()
        self.count = 0
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.running: list[Any] = []
        self.thread = 0

    def call(self, step: Any, mode: DataParallel, args: Any, kwargs: Any) -> Any:
        """Run a step, with its state made data parallel."""
        if self.running:
            return self._call_inside(step, args, kwargs)
        self.running.append(step)
        self.thread = threading.get_ident()
        try:
            with torch.inference_mode(False):
                self._enter(step, mode, args, kwargs)
            failed = True
            try:
                result = step.function(*args, **kwargs)
                failed = False
            finally:
                with torch.inference_mode(False):
                    self._leave(failed)
            return result
        finally:
            self.running.pop()

    def _call_inside(self, step: Any, args: Any, kwargs: Any) -> Any:
        """Run a step that another one calls as a part of that."""
        if threading.get_ident() != self.thread:
            raise SPMDError(
                "The step was called while another thread is in a call.",
                remedy="Call compiled steps from one thread at a time.",
            )
        if step in self.running:
            raise SPMDError("The step calls itself.", remedy="Let it call the function that is not compiled.")
        self.running.append(step)
        try:
            return step.function(*args, **kwargs)
        finally:
            self.running.pop()

    # -- before the step

    def _enter(self, step: Any, mode: DataParallel, args: Any, kwargs: Any) -> None:
        record = self._record_of(step)
        found = find_state(step.function, args, kwargs)
        slots, buffers = registered(found.modules)
        tensors = tensors_of(slots, found.optimizers)
        roster = record.roster_of(tensors, found.optimizers)
        new = 0 if roster is not None else self._count_new(tensors, found.optimizers)
        header = CallHeader(record.number, record.calls, 0, new, len(tensors))
        device = tensors[0].device if tensors else torch.device("cpu")
        record.calls += 1
        self.meeting.begin(header, device, lambda: self._checksum(record))
        if roster is None:
            roster = self._make_roster(mode, found, slots, buffers, tensors, new)
            record.add(roster)
        self._hook(roster)
        self.averager.begin(roster)
        self._share_buffers(found, buffers)

    def _record_of(self, step: Any) -> StepRecord:
        if step not in self.steps:
            self.steps[step] = StepRecord(self.count)
            self.count += 1
        return self.steps[step]

    def _count_new(self, tensors: list[torch.Tensor], optimizers: list[Optimizer]) -> int:
        return sum([not self._is_managed(t) for t in tensors]) + sum([o not in self.optimizers for o in optimizers])

    def _is_managed(self, tensor: torch.Tensor) -> bool:
        managed = managed_by(tensor)
        return managed is not None and managed.layout.world == self.wire.world

    def _checksum(self, record: StepRecord) -> torch.Tensor | None:
        roster = self.averager.roster
        assert roster is not None
        return self.checksum.of([managed.plain for managed in roster.params if not managed.sharded], record.calls)

    def _make_roster(
        self,
        mode: DataParallel,
        found: FoundState,
        slots: list[ParamSlot],
        buffers: list[torch.Tensor],
        tensors: list[torch.Tensor],
        new: int,
    ) -> Roster:
        names = {id(tensor): name for name, tensor in slot_names(found.modules)}
        named = [(names.get(id(tensor), f"parameter {i}"), tensor) for i, tensor in enumerate(tensors)]
        named_buffers = [(names[id(buffer)], buffer) for buffer in buffers]
        try:
            self._admit(found, named, named_buffers)
        except Exception as error:
            self.meeting.refuse(error)
            raise
        fresh = [optimizer for optimizer in found.optimizers if optimizer not in self.optimizers]
        if new and self.wire.world > 1:
            self.meeting.meet_without_checksum()
            facts = facts_of(named, named_buffers, fresh)
            compare_facts(self.wire.gather_objects(facts))
            self._take_over([t for t in tensors if not self._is_managed(t)], buffers, fresh)
        self.optimizers.update(fresh)
        params = [self._manage(name, tensor) for name, tensor in named]
        roster = Roster(params, tensors, found.optimizers, BucketStore(params, mode.bucket_bytes))
        return roster

    def _admit(self, found: FoundState, *named: list[tuple[str, torch.Tensor]]) -> None:
        admit_modules(found.modules)
        for several in named:
            for name, tensor in several:
                admit_tensor(name, tensor)

    @torch.no_grad()
    def _take_over(self, params: list[torch.Tensor], buffers: list[torch.Tensor], fresh: list[Optimizer]) -> None:
        """Give all ranks rank 0's values, and the mean of the gradients that exist."""
        device = self.meeting.device
        self.wire.broadcast([*params, *buffers, *state_tensors(fresh)], device)

    def _manage(self, name: str, tensor: torch.Tensor) -> ManagedParam:
        known = managed_by(tensor)
        if known is not None and self._is_managed(tensor):
            return known
        layout = Layout(torch.Size(tensor.shape), False, self.wire.rank, self.wire.world)
        if known is not None:
            known.layout = layout
            return known
        return manage(tensor, layout, name)

    def _hook(self, roster: Roster) -> None:
        if self.wire.world > 1:
            for managed in roster.params:
                if not managed.hooked and (managed.plain.is_floating_point() or managed.plain.is_complex()):
                    managed.hook()

    def _share_buffers(self, found: FoundState, buffers: list[torch.Tensor]) -> None:
        """Give all ranks rank 0's buffers before a training step, as DDP does."""
        if buffers and self.wire.world > 1 and any([module.training for module in found.modules]):
            self.meeting.meet()
            with torch.no_grad():
                self.wire.broadcast(buffers, self.meeting.device)

    # -- after the step

    def _leave(self, failed: bool) -> None:
        self.averager.end(failed)
        self._name_strangers(failed)

    def _name_strangers(self, failed: bool) -> None:
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
                remedy="Pass the module that owns them to the step, or hold it in a variable that the step names.",
            )


_engines: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()


def current_engine() -> Engine:
    """The engine of the default group."""
    if not dist.is_initialized():
        raise SPMDError("There is no process group.", remedy="Call torch.distributed.init_process_group first.")
    group = dist.group.WORLD
    if group not in _engines:
        _engines[group] = Engine(group)  # type: ignore[arg-type]
    return _engines[group]
