"""Enrolment: the state that a call has found becomes data parallel, by the engine. It can be undone."""

import torch

from ..engine.engine_core import StateEngine, StepHistory
from ..engine.managed_params import forget, managed_by
from ..engine.row_optimizers import shard_states, why_whole
from ..engine.state_finder import FoundState
from ..parallel_modes import DataParallel
from ..spmd_errors import SPMDError
from .snapshot import StateSnapshot


class Enrolment:
    """Makes sure that the engine manages the state of a call, and that all ranks have the same."""

    def __init__(self, engine: StateEngine, history: StepHistory, mode: DataParallel, found: FoundState) -> None:
        self._engine, self._history = engine, history
        self._before: StateSnapshot | None = None
        self._optimizers = [o for o in found.optimizers if o not in engine.maker.optimizers]
        known: list[bool] = []

        def check(tensors: list[torch.Tensor], new: int) -> None:
            if not tensors:
                raise SPMDError("The step has no parameters.", remedy="Call it without compiling it.")
            known.extend(managed_by(tensor) is not None for tensor in tensors)
            self._before = StateSnapshot(found) if new else None

        self.roster, slots = engine.enrol(history, mode, found, check=check)
        self._fresh = [managed for managed, had in zip(self.roster.params, known, strict=True) if not had]
        if self.roster.rests and self._before is not None:  # modules and optimizers hold what they hold between calls
            engine.resting.enter(self.roster, slots)
            engine.resting.leave(found.modules, False)
            for optimizer in found.optimizers:
                if why_whole(optimizer) is None:
                    shard_states(optimizer, [managed for managed in self.roster.params if managed.sharded])

    def undo(self) -> None:
        """Restore model and optimizers, if this call was the first to have them."""
        if self._before is not None:
            for managed in self._fresh:
                forget(managed)
            self._engine.forget(self.roster, self._history, self._optimizers)
            self._before.restore()
