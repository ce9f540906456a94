"""Steps that are captured: a call finds the program for its arguments, or records it, and the ranks run it together."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_testing_ext._torch.spmd import is_fake

from ..engine.engine_core import StateEngine, current_engine
from ..engine.engine_step import EngineStep
from ..engine.meeting_point import CallHeader
from ..engine.state_finder import find_state
from ..parallel_modes import DataParallel
from ..spmd_errors import SPMDError
from .captured_state import CallArguments, CapturedState
from .enrolment import Enrolment
from .program import StepProgram, StepReport, report_of
from .program_maker import GraphPasses, make_program
from .step_recording import ENGINE
from .verification import VERIFIES, VerifyMode, is_due, verified

_MOST_PROGRAMS = 64


class CaptureStep(EngineStep):
    """A train step as a data-parallel program. Every rank calls it like the step itself, with its own batch."""

    def __init__(
        self, function: Callable[..., Any], mode: DataParallel, passes: GraphPasses, verify: VerifyMode
    ) -> None:
        super().__init__(function, mode)
        self.passes, self.verify = passes, verify
        self.recordings = 0
        self._last: StepProgram | None = None
        self._programs: dict[Any, list[StepProgram]] = {}  # by the call's arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = current_engine()
        if engine.stack:  # a part of the step that calls it
            return super().__call__(*args, **kwargs)
        grad_mode = torch.is_grad_enabled()
        with engine.stack.entered(self), torch.inference_mode(False), torch.set_grad_enabled(grad_mode):
            call = CallArguments(args, kwargs, engine.meeting.device.type, self.function)
            program = next((p for p in self._programs.get(call.signature, ()) if p.fits()), None)
            return self._new_call(engine, call) if program is None else self._run(engine, program, call)

    def _run(self, engine: StateEngine, program: StepProgram, call: CallArguments) -> Any:
        self._last = program
        verifies = self._is_due(engine, program)
        if program.meets and engine.wire.world > 1:
            self._begin(engine, VERIFIES if verifies else 0, program.recorded.number)
            engine.meeting.meet()
            verifies = bool(engine.meeting.reads & VERIFIES)
        if program.effects.makes_states:
            return engine.run(self, self.mode, call.args, call.kwargs)
        return (self._verify if verifies else self._run_program)(engine, program, call)

    def _begin(self, engine: StateEngine, reads: int = 0, number: int = 0) -> None:
        history = engine.history_of(self)
        header = CallHeader(history.number, history.calls, reads=reads, program=number)
        engine.meeting.begin(header, engine.meeting.device, lambda: None, None)

    def _is_due(self, engine: StateEngine, program: StepProgram) -> bool:
        history, verify = engine.history_of(self), "off" if program.recorded.changed_by_user else self.verify
        return is_due(verify, program.verified, history.number, history.calls if program.meets else program.calls)

    def _run_program(self, engine: StateEngine, program: StepProgram, call: CallArguments) -> Any:
        if program.effects.shares_buffers and engine.wire.world > 1:
            with torch.no_grad():
                engine.wire.broadcast(program.state.roster.buffers, engine.meeting.device)
        result = program(call.leaves)
        engine.history_of(self).calls += program.meets
        return result

    def _verify(self, engine: StateEngine, program: StepProgram, call: CallArguments) -> Any:
        """Run a call by the program and by the engine, and compare."""
        module = program.recorded.module
        captured = [getattr(module, str(node.target), None) for node in module.graph.nodes if node.op == "get_attr"]
        tensors = [*call.tensors(), *(value for value in captured if isinstance(value, torch.Tensor))]
        history, together = engine.history_of(self), program.meets and engine.wire.world > 1
        calls, compiled = history.calls, functools.partial(self._run_program, engine, program, call)

        def eager() -> Any:
            result = engine.run(self, self.mode, call.args, call.kwargs)
            history.calls = calls
            return result

        try:
            result = verified(engine, program.state.found, tensors, together, eager, compiled)
        except BaseException:
            self._programs[call.signature].remove(program)
            raise
        program.verified += 1
        return result

    def _new_call(self, engine: StateEngine, call: CallArguments) -> Any:
        found = find_state(self.function, call.args, call.kwargs)
        enrolment = Enrolment(engine, engine.history_of(self), self.mode, found)
        try:
            state = CapturedState(found, enrolment.roster, engine.wire.world)
            return self._run(engine, self._find_or_make(engine, state, call), call)
        except BaseException:
            enrolment.undo()
            raise

    def _find_or_make(self, engine: StateEngine, state: CapturedState, call: CallArguments) -> StepProgram:
        programs, present = self._programs.setdefault(call.signature, []), state.present_grads()
        program = next((p for p in programs if p.present == present and p.key == state.key()), None)
        if program is None:
            program = self._make(engine, state, call)
            programs.append(program)
        program.bind(state)
        return program

    def _make(self, engine: StateEngine, state: CapturedState, call: CallArguments) -> StepProgram:
        try:
            if sum(map(len, self._programs.values())) >= _MOST_PROGRAMS:
                raise SPMDError("Arguments or settings change from call to call.", remedy=f"Pass tensors. {ENGINE}")
            program = make_program(self.function, call, state, engine.wire, self.passes)
            if any(map(is_fake, find_state(self.function, call.args, call.kwargs).tensors)):
                raise SPMDError("The step keeps a tensor in a list, a dict or an attribute.", remedy=ENGINE)
        except Exception as error:
            self._begin(engine)
            engine.meeting.refuse(error)
            raise
        self.recordings += 1
        return program

    @property
    def last(self) -> StepProgram:
        if self._last is None:
            raise SPMDError("The step has not been called yet.", remedy="Call it once: the first call records it.")
        return self._last

    @property
    def graph(self) -> fx.GraphModule:
        return self.last.recorded.module

    def print_readable(self) -> str:
        """Print the graph of the last call as code, and return it."""
        return self.graph.print_readable()

    def report(self) -> StepReport:  # type: ignore[override]
        """Summarize the program of the last call: its collectives, and the parameters in each bucket."""
        return report_of(self.name, self.last, self.recordings)
