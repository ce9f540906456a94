"""`compile`: steps that are captured, steps with regions, and their verification."""

import functools
import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from unittest import mock

import torch
from torch import fx

from torch_testing_ext._machine.accelerators import RandomState
from torch_testing_ext._torch.tracing import disable_torch_function, is_fake, tree

from .averaging import CallHeader
from .captured_state import CallArguments, CapturedState, Enrolment, local_part
from .parallel_modes import DataParallel, GraphPass, Override, ParallelMode, SPMDError, check_choice
from .roster import FoundState, StateSnapshot, find_state
from .state_engine import EngineReport, EngineStep, StateEngine, current_engine
from .step_recording import ENGINE, GraphPasses, StepProgram, StepReport, make_program, report_of

# --------------------------------------------------------------------------------------------------------------------
# Verification: a call that runs a program and the engine on the same state, and compares what they leave behind.
#
# All ranks verify in the same call. If the two differ anywhere, all ranks undo the call and raise an error.

VerifyMode = Literal["first", "always", "off"]
# The bit of a header that asks all ranks to verify.
VERIFIES = 4
# Relative to the largest element of a tensor: runs that round alike agree bit for bit, other orders of a sum do not.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Kernels that round differently switch a few ReLUs, each with a row's part of a gradient: what this may change of the
# largest element, and of the norm.
_SWITCHED = {torch.float32: (5e-2, 1e-2)}
# A gradient this much smaller than the largest of all is rounding, which optimizers such as Adam amplify.
_NOISE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def is_drawn(step: int, call: int) -> bool:
    """Is a call of a step verified at random? All ranks draw the same."""
    return zlib.crc32(b"%d %d" % (step, call)) % 100 == 0


def is_due(verify: VerifyMode, times: int, step: int, call: int) -> bool:
    """Is a call to be verified of something that has been verified so many times?"""
    if verify == "first":
        return times == 0 or is_drawn(step, call)
    return verify == "always"


def verified(
    engine: StateEngine,
    found: FoundState,
    tensors: list[torch.Tensor],
    together: bool,
    eager: Any,
    compiled: Any,
    same_kernels: bool = True,
) -> Any:
    """Run a call both ways. Return the result of `compiled`, or raise an error: if `together`, on all ranks."""
    before = StateSnapshot(found, tensors)
    try:
        theirs = record_run(eager(), found)
        before.restore()
        result = compiled()
        difference = first_difference(record_run(result, found), theirs, same_kernels)
        differences = engine.wire.gather_objects(difference) if together else [difference]
        for rank, difference in enumerate(differences):
            if difference is not None:
                raise SPMDError(
                    f"The compiled step is not equivalent to the engine: {difference}, on rank {rank}. Both ran on the "
                    "same batch; the call has been undone.",
                    remedy="The step depends on something that is not recorded, or that is recorded wrongly: drop "
                    'backend=. Or pass compile(verify="off") if the difference does not matter.',
                )
    except BaseException:
        before.restore()
        raise
    return result


def record_run(result: Any, found: FoundState) -> dict[str, Any]:
    """A copy of what a run returned, and of the state that it left: of DTensors, this rank's part."""
    leaves = tree().tree_leaves(result)
    record: dict[str, Any] = {f"result {position}": leaf for position, leaf in enumerate(leaves)}
    record["result structure"] = _structure_of(result)
    record["random numbers of Python and numpy"] = RandomState.of_python()
    names: dict[int, str] = {}
    with disable_torch_function():
        for root in found.modules:
            _record_module(record, names, root)
        for number, optimizer in enumerate(found.optimizers):
            _record_optimizer(record, names, optimizer, number)
        return {name: _copy(local_part(value)) for name, value in record.items()}


def _structure_of(value: Any) -> str:
    """The containers in what a step returned. Programs return a `torch.Size` as a tuple."""
    name = "tuple" if isinstance(value, torch.Size) else type(value).__name__
    if isinstance(value, dict):
        return f"{name}({', '.join(f'{key!r}: {_structure_of(inner)}' for key, inner in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"{name}({', '.join(map(_structure_of, value))})"
    return "*"


def _record_module(record: dict[str, Any], names: dict[int, str], root: torch.nn.Module) -> None:
    """Add the state of a module to a record, and the names of its parameters to those by `id`."""
    for name, param in root.named_parameters():
        names[id(param)] = name
        record[f"gradient of {name}"] = param.grad
        record[f"parameter {name}"] = param
        record[f"requires_grad of {name}"] = param.requires_grad
    for name, buffer in root.named_buffers():
        record[f"buffer {name}"] = buffer
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)):
                record[f"{key} of {name or 'the model'}"] = value


def _record_optimizer(record: dict[str, Any], names: dict[int, str], optimizer: Any, number: int) -> None:
    """Add the settings and the state of an optimizer to a record."""
    for position, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                record[f"{key} of group {position}, optimizer {number}"] = value
    for position, (param, state) in enumerate(optimizer.state.items()):
        owner = names.get(id(param), f"entry {position}")
        for path, leaf in tree().tree_flatten_with_path(state)[0]:
            record[f"state{tree().keystr(path)} of {owner}"] = leaf


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Tolerance:
    """The differences that are allowed between a tensor of two runs.

    `floor`: the largest element that the tolerance is relative to, unless that of the tensor is larger. `ignored`: the
    elements that do not count. `switched`: how much of the largest element, and of the norm, a few switched ReLUs may
    change.
    """

    floor: float = 0.0
    ignored: torch.Tensor | None = None
    switched: tuple[float, float] | None = None
    # Numbers of Python come from no kernel, and so are the same.
    has_exact_numbers: bool = False

    def allows(self, off: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
        """May a tensor of this type differ from the expected one by `off`?"""
        largest_difference = float(off.max())
        if not (dtype.is_floating_point or dtype.is_complex):
            return largest_difference <= 0.0
        largest = _largest(expected)
        if largest_difference <= _TOLERANCES.get(dtype, 1e-4) * max(largest, self.floor):
            return True
        if self.switched is None:
            return False
        of_largest, of_norm = self.switched
        return largest_difference <= of_largest * largest and bool(off.norm() <= of_norm * expected.norm())


def first_difference(mine: dict[str, Any], theirs: dict[str, Any], same_kernels: bool = True) -> str | None:
    """The first difference between two runs, if any: results, gradients, then what follows from them."""
    grads = _gradients_of(theirs)
    largest = max((float(grad.abs().max()) for grad in grads.values()), default=0.0)
    # By parameter: the elements whose gradient rounding decides.
    unclear: dict[str, torch.Tensor] = {}
    for name in sorted({*mine, *theirs}, key=_rank_of_name):
        if name not in mine or name not in theirs:
            return f"only the {'eager' if name in theirs else 'compiled'} step has {name}"
        parameter = name.rpartition(" ")[2]
        if name.startswith("gradient"):
            grad = grads.get(parameter)
            switched = None if grad is None or same_kernels else _SWITCHED.get(grad.dtype)
            difference = _difference(mine[name], theirs[name], Tolerance(0.01 * largest, switched=switched))
            if difference is None and grad is not None:
                unclear[parameter] = _is_unclear(mine[name], grad, largest)
        elif name.startswith(("parameter", "state")):
            difference = _difference(mine[name], theirs[name], Tolerance(ignored=unclear.get(parameter)))
        else:
            difference = _difference(mine[name], theirs[name], Tolerance(has_exact_numbers=same_kernels))
        if difference is not None:
            return f"{name} {difference}"
    return None


def _rank_of_name(name: str) -> tuple[bool, str]:
    """Results and gradients come before what follows from them."""
    return not name.startswith(("result", "gradient")), name


def _gradients_of(record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of a run that can be compared by size, by parameter."""
    grads = {}
    for name, value in record.items():
        is_tensor = name.startswith("gradient of") and isinstance(value, torch.Tensor)
        if is_tensor and value.numel() and value.is_floating_point():
            grads[name.removeprefix("gradient of ")] = value
    return grads


def _is_unclear(mine: torch.Tensor, theirs: torch.Tensor, largest: float) -> torch.Tensor:
    """The elements of a gradient that are small, or differ by more than rounding."""
    size = theirs.to_dense().abs()
    off = (mine - theirs).to_dense().abs()
    noise = _NOISE.get(theirs.dtype, 0.0)
    tolerance = _TOLERANCES.get(theirs.dtype, 0.0)
    return (size <= noise * largest) | (off > tolerance * size)


def _difference(mine: Any, theirs: Any, tolerance: Tolerance) -> str | None:
    """Describe how a value differs from the expected one; None if it does not."""
    if isinstance(theirs, float) and isinstance(mine, float) and not tolerance.has_exact_numbers:
        mine = torch.tensor(mine)
        theirs = torch.tensor(theirs)
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        is_comparable = isinstance(theirs, (bool, int, float, complex, str, bytes, type(None)))
        both_are_nan = is_comparable and mine != mine and theirs != theirs
        is_same = type(mine) is type(theirs) and (not is_comparable or mine == theirs or both_are_nan)
        return None if is_same else f"is {_described(mine)} instead of {_described(theirs)}"
    if (mine.shape, mine.dtype, mine.layout) != (theirs.shape, theirs.dtype, theirs.layout):
        return f"is {_described(mine)} instead of {_described(theirs)}"
    if mine.numel() == 0 or torch.equal(mine, theirs):
        return None
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    actual = mine.to_dense().to("cpu", wide)
    expected = theirs.to_dense().to("cpu", wide)
    is_equal = (actual == expected) | (actual.isnan() & expected.isnan())
    off = torch.where(is_equal, 0.0, (actual - expected).abs()).nan_to_num(nan=float("inf"))
    ignored = tolerance.ignored
    if ignored is not None and ignored.shape == off.shape:
        off = torch.where(ignored.cpu(), 0.0, off)
    if tolerance.allows(off, expected, theirs.dtype):
        return None
    return f"differs by up to {float(off.max()):.2g} (its largest element is {_largest(expected):.2g})"


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite element."""
    return float(torch.where(tensor.isfinite(), tensor.abs(), 0.0).max())


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return repr(value)[:60]


# --------------------------------------------------------------------------------------------------------------------
# Steps that are captured: a call finds the program for its arguments, or records it, and the ranks run it together.


class CaptureStep(EngineStep):
    """A train step as a data-parallel program. Every rank calls it like the step itself, with its own batch."""

    most_programs = 64

    def __init__(
        self, function: Callable[..., Any], mode: DataParallel, passes: GraphPasses, verify: VerifyMode
    ) -> None:
        super().__init__(function, mode)
        self.passes, self.verify = passes, verify
        self.recordings = 0
        self._last: StepProgram | None = None
        # By the call's arguments.
        self._programs: dict[Any, list[StepProgram]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = current_engine()
        # A part of the step that calls it.
        if engine.stack:
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
        """The program for these arguments, this state and the gradients that are there; a new one is recorded."""
        programs = self._programs.setdefault(call.signature, [])
        present = state.present_grads()
        for program in programs:
            if program.present == present and program.key == state.key():
                break
        else:
            program = self._make(engine, state, call)
            programs.append(program)
        program.bind(state)
        return program

    def _make(self, engine: StateEngine, state: CapturedState, call: CallArguments) -> StepProgram:
        try:
            if sum(map(len, self._programs.values())) >= self.most_programs:
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


# --------------------------------------------------------------------------------------------------------------------
# Regions: the engine runs the step's Python, in which torch.compile compiles the modules' forward and the optimizers.
#
# The first call is eager, and shows whether the step differentiates through gradients, for which regions have no
# code.


class RegionStep(EngineStep):
    """A train step whose state is data parallel, with compiled regions from the second call on."""

    def __init__(self, function: Callable[..., Any], mode: DataParallel, verify: VerifyMode) -> None:
        super().__init__(function, mode)
        self.verify, self.verified, self.why_eager = verify, 0, "it is the first call"
        # By identity: an owner, and its compiled method.
        self._regions: dict[int, tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step, with the regions that it owns compiled."""
        engine = current_engine()
        if engine.stack:
            return super().__call__(*args, **kwargs)
        with engine.stack.entered(self):
            found = find_state(self.function, args, kwargs)
            eager = functools.partial(engine.run, self, self.mode, args, kwargs)
            history = engine.history_of(self)
            if not history.calls:
                with self._looking_for_create_graph():
                    return eager()
            compiled = functools.partial(self._run_compiled, eager, found)
            if self.why_eager or not is_due(self.verify, self.verified, history.number, history.calls):
                return (eager if self.why_eager else compiled)()
            together = engine.wire.world > 1 and any(history.rosters[-1].plans.values())
            tensors = CallArguments(args, kwargs, "cpu", None).tensors()
            result = verified(engine, found, tensors, together, eager, compiled, same_kernels=False)
            self.verified += 1
            return result

    def _run_compiled(self, eager: Callable[[], Any], found: FoundState) -> Any:
        with ExitStack() as stack:
            owners: list[Any] = [*found.modules, *found.optimizers]
            for owner in owners:
                name = "forward" if isinstance(owner, torch.nn.Module) else "step"
                if id(owner) not in self._regions:
                    self._regions[id(owner)] = owner, torch.compile(getattr(owner, name))
                    # Known to the engine: it may run on rows.
                    self._regions[id(owner)][1]._wrapped_by_lr_sched = True
                stack.enter_context(mock.patch.object(owner, name, self._regions[id(owner)][1]))
            return eager()

    @contextmanager
    def _looking_for_create_graph(self) -> Iterator[None]:
        self.why_eager = ""

        def watched(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if inspect.signature(function).bind(*args, **kwargs).arguments.get("create_graph"):
                    self.why_eager = "the step differentiates through gradients (create_graph)"
                return function(*args, **kwargs)

            return call

        watches = {name: watched(getattr(torch.autograd, name)) for name in ("backward", "grad")}
        with mock.patch.multiple(torch.autograd, **watches):
            yield

    def report(self) -> EngineReport:
        """Summarize the last call, as for the engine, and tell what is compiled."""
        report = super().report()
        how = f"eager: {self.why_eager}" if self.why_eager else f"compiled, verified {self.verified} times"
        return replace(report, optimizers=(*report.optimizers, f"forward and optimizers are {how}"))


# --------------------------------------------------------------------------------------------------------------------
# `compile`, the decorator that makes a train step data parallel.

Backend = Literal["engine", "capture", "fx", "inductor"]


def compile(
    module_override: list[Override] | None = None,
    gm_transformation: GraphPass | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    backend: Backend | None = None,
    verify: VerifyMode = "first",
) -> Callable[[Callable[..., Any]], EngineStep | CaptureStep]:
    """Make a train step written for one device data parallel: `step(model, optimizer, batch)`.

    Every rank calls the step with its own batch. The first call gives all ranks rank 0's weights. The update applies
    the mean gradient over ranks; the return value is the rank's own.

    module_override: replaces submodules while the step is recorded; see `Override`. Implies backend="capture".
    gm_transformation: called with the final graph module; changes it in place or returns another. Implies
        backend="capture".
    parallel_mode: `DataParallel("replicate")` by default.
    backend: "engine", the default, runs the step's Python, and averages and shards around it. "capture" records the
        whole step as one program that runs operation by operation ("fx" is its old name). "inductor" is the engine
        with torch.compile for forward and optimizers, from the second call on.
    verify: of what is recorded or compiled: "first" also runs the engine at the first call of each program and at
        random later ones, and raises an error if the results differ; "always" does so at every call, "off" at none.
    """
    check_choice("verify", verify, get_args(VerifyMode))
    check_choice("backend", backend, (*get_args(Backend), None))
    mode = parallel_mode if parallel_mode is not None else DataParallel()
    passes = [
        graph_pass for graph_pass in (getattr(mode, "custom_passes", None), gm_transformation) if graph_pass is not None
    ]
    if backend in ("engine", "inductor") and (module_override or passes):
        raise SPMDError(f"backend={backend!r} runs Python and has no graph to change.", remedy='Use backend="capture".')
    if not isinstance(mode, DataParallel):
        raise SPMDError(f"parallel_mode is {mode!r}.", remedy="Pass a DataParallel.")
    chosen = backend or ("capture" if module_override or passes else "engine")

    def decorate(step: Callable[..., Any]) -> EngineStep | CaptureStep:
        if chosen == "engine":
            return EngineStep(step, mode)
        if chosen == "inductor":
            return RegionStep(step, mode, verify)
        return CaptureStep(step, mode, GraphPasses(mode.bucket_bytes, list(module_override or ()), passes), verify)

    return decorate
