"""Steps that are captured: a call finds the program for its arguments, or records it, and the ranks run it together."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..engine.call_header import CallHeader
from ..engine.engine_core import StateEngine, StepHistory, current_engine
from ..engine.state_finder import find_state
from ..parallel_modes import DataParallel
from ..spmd_errors import SPMDError
from .call_arguments import CallArguments
from .captured_state import CapturedState
from .enrolment import Enrolment
from .program import Program
from .program_maker import GraphPasses, VerificationDue, make_program
from .program_report import StepReport, count_collectives
from .recording import ENGINE
from .snapshot import captured_tensors
from .verification import VERIFIES, Verification, VerifyMode, is_drawn

_MOST_PROGRAMS = 64


class CaptureStep:
    """A train step as a data-parallel program. Every rank calls it like the step itself, with its own batch."""

    def __init__(self, function: Callable[..., Any], mode: DataParallel, passes: GraphPasses, verify: VerifyMode) -> None:
        functools.update_wrapper(self, function)
        self.function, self.mode, self.passes, self.verify = function, mode, passes, verify
        self.recordings = 0
        self._last: tuple[Program, int] | None = None  # with the number of ranks
        self._quick: dict[Any, list[Program]] = {}  # by the call's arguments
        self._known: dict[Any, list[Program]] = {}  # by everything that a program depends on

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = current_engine()
        if engine.stack:  # a part of the step that calls it
            return engine.call(self, self.mode, args, kwargs)
        with engine.stack.entered(self), torch.inference_mode(False):
            call = CallArguments(args, kwargs, engine.meeting.device.type)
            program = next((p for p in self._quick.get(call.signature, ()) if p.fits()), None)
            if program is None:
                return self._new_call(engine, call)
            return self._run(engine, program, call)

    # -- a call

    def _run(self, engine: StateEngine, program: Program, call: CallArguments) -> Any:
        history = engine.history_of(self)
        self._last = program, engine.wire.world
        verifies = self._is_due(program, history)
        if program.meets and engine.wire.world > 1:
            header = CallHeader(history.number, history.calls, program=program.lowered.number)
            self._arrive(engine, header._replace(reads=VERIFIES if verifies else 0))
            if verifies or program.lowered.changes_early or program.effects.shares_buffers:
                engine.meeting.check()
                verifies = verifies or bool(engine.meeting.reads & VERIFIES)
        try:
            if not verifies:
                return self._run_program(engine, program, call)
        except VerificationDue:
            pass
        return self._verify(engine, program, call)

    def _arrive(self, engine: StateEngine, header: CallHeader) -> None:
        engine.meeting.begin(header, engine.meeting.device, lambda: None, None)
        engine.meeting.arrive()

    def _is_due(self, program: Program, history: StepHistory) -> bool:
        """Whether this rank wants to verify the call."""
        if self.verify == "off" or program.changed_by_user:
            return False
        if self.verify == "always" or not program.verified:
            return True
        return is_drawn(history.number, history.calls if program.meets else program.calls)

    def _run_program(self, engine: StateEngine, program: Program, call: CallArguments) -> Any:
        if program.effects.shares_buffers and engine.wire.world > 1:
            with torch.no_grad():
                engine.wire.broadcast(program.state.buffers, engine.meeting.device)
        result = program(call.leaves)
        if program.meets:
            engine.history_of(self).calls += 1
        return result

    def _verify(self, engine: StateEngine, program: Program, call: CallArguments) -> Any:
        tensors = [*call.tensors(), *captured_tensors(program.lowered.module)]
        history, found = engine.history_of(self), program.state.found
        calls = history.calls
        verification = Verification(engine, found, tensors, program.meets and engine.wire.world > 1)

        def eager() -> Any:
            result = engine.run(self, self.mode, call.args, call.kwargs)
            history.calls = calls
            return result

        try:
            result = verification.run(eager, lambda: self._run_program(engine, program, call))
        except BaseException:
            self._forget(program)
            raise
        program.verified += 1
        return result

    def _forget(self, program: Program) -> None:
        for programs in (*self._known.values(), *self._quick.values()):
            if program in programs:
                programs.remove(program)

    # -- a call for which no program is known

    def _new_call(self, engine: StateEngine, call: CallArguments) -> Any:
        found = find_state(self.function, call.args, call.kwargs)
        history = engine.history_of(self)
        enrolment = Enrolment(engine, history, self.mode, found)
        try:
            program = self._find_or_make(engine, CapturedState(found, enrolment.roster, engine.wire.world), call)
            return self._run(engine, program, call)
        except BaseException:
            enrolment.undo()
            raise

    def _find_or_make(self, engine: StateEngine, state: CapturedState, call: CallArguments) -> Program:
        key, present = (state.key(), call.signature), state.present_grads()
        known = self._known.setdefault(key, [])
        program = next((p for p in known if p.present == present), None)
        if program is not None:
            program.bind(state)
        else:
            program = self._make(engine, state, call, present)
            known.append(program)
        quick = self._quick.setdefault(call.signature, [])
        if program not in quick:
            quick.append(program)
        return program

    def _make(self, engine: StateEngine, state: CapturedState, call: CallArguments, present: list[bool]) -> Program:
        try:
            if sum(map(len, self._known.values())) >= _MOST_PROGRAMS:
                raise SPMDError(
                    f"The step needs more than {_MOST_PROGRAMS} programs: its arguments, or settings of model and "
                    "optimizers, change from call to call.",
                    remedy=f"Pass what changes as tensors of the same shape. {ENGINE}",
                )
            program = make_program(self.function, call, state, engine.wire, self.passes)
        except Exception as error:
            history = engine.history_of(self)
            header = CallHeader(history.number, history.calls)
            engine.meeting.begin(header, engine.meeting.device, lambda: None, None)
            engine.meeting.refuse(error)
            raise
        self.recordings += 1
        return program

    # -- inspection

    @property
    def graph(self) -> fx.GraphModule:
        """The graph of the last call."""
        return self._last_program()[0].lowered.module

    def print_readable(self) -> str:
        """Print the graph of the last call as code, and return it."""
        return self.graph.print_readable()

    def report(self) -> StepReport:
        """Summarize the program of the last call: its collectives, and the parameters in each bucket."""
        program, world = self._last_program()
        nodes = program.lowered.module.graph.nodes
        why = "changed by an override or a pass" if program.changed_by_user else f'verify="{self.verify}"'
        return StepReport(
            self.function.__name__,
            world,
            self.recordings,
            sum(node.op not in ("placeholder", "output") for node in nodes),
            count_collectives(program.lowered.module.graph),
            program.lowered.buckets,
            f"verified {program.verified} times" if program.verified else f"not verified: {why}",
        )

    def _last_program(self) -> tuple[Program, int]:
        if self._last is None:
            raise SPMDError("The step has not been called yet.", remedy="Call it once: the first call records it.")
        return self._last
