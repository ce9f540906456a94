"""Enrolment: the state that a call has found becomes data parallel, by the engine. It can be undone."""

from __future__ import annotations

from ..engine.call_header import CallHeader
from ..engine.engine_core import StateEngine, StepHistory
from ..engine.managed_params import forget, managed_by
from ..engine.optimizer_kinds import why_whole
from ..engine.roster import registered, tensors_of
from ..engine.row_optimizers import shard_states
from ..engine.state_finder import FoundState
from ..parallel_modes import DataParallel
from ..spmd_errors import SPMDError
from .snapshot import StateSnapshot


class Enrolment:
    """Makes sure that the engine manages the state of a call, and that all ranks have the same."""

    def __init__(self, engine: StateEngine, history: StepHistory, mode: DataParallel, found: FoundState) -> None:
        self._engine, self._history = engine, history
        slots, buffers = registered(found.modules)
        tensors = tensors_of(slots, found.optimizers)
        self._before: StateSnapshot | None = None
        roster = history.roster_of(tensors, found.optimizers)
        if roster is None:
            maker, meeting = engine.maker, engine.meeting
            new = maker.count_new(tensors, found.optimizers)
            device = next((tensor.device for tensor in tensors if not tensor.is_meta), meeting.device)
            meeting.begin(CallHeader(history.number, history.calls, 0, new, len(tensors)), device, lambda: None, None)
            try:
                plan = maker.admit(mode, found, slots, buffers, tensors)
                if not tensors:
                    raise SPMDError("The step has no parameters.", remedy="Call it without compiling it.")
                self._before = StateSnapshot(found) if new else None
            except Exception as error:
                meeting.refuse(error)
                raise
            self._optimizers = [o for o in found.optimizers if o not in maker.optimizers]
            known = [managed_by(tensor) is not None for tensor in tensors]
            roster = maker.make(plan, new > 0)
            self._fresh = [managed for managed, had in zip(roster.params, known, strict=True) if not had]
            if roster.rests and new:  # let modules and optimizers hold what they hold between calls
                engine.resting.enter(roster, slots)
                engine.resting.leave(found.modules, False)
                for optimizer in found.optimizers:
                    if why_whole(optimizer) is None:
                        shard_states(optimizer, [managed for managed in roster.params if managed.sharded])
        self.roster = roster
        history.add(roster)

    def undo(self) -> None:
        """Restore model and optimizers, if this call was the first to have them."""
        if self._before is None:
            return
        for managed in self._fresh:
            forget(managed)
        self._engine.forget(self.roster, self._history, self._optimizers)
        self._before.restore()
