"""The engine of one group of ranks: its rosters, its steps, its report."""

import atexit
import functools
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._process.words import first_names, size_in_words
from torch_testing_ext._torch.tracing import disable_torch_function, tree

from .averaging import Averager, CallHeader, MeetingPoint, UseWatch, parameters_behind, unmanaged_parameters
from .gradient_buckets import (
    BackwardPlan,
    BucketStore,
    ManagedParam,
    Wire,
    forget_parameter,
    manage_parameter,
    managed_by,
    mark_work,
    record_picture,
)
from .parallel_modes import DataParallel, Layout, SPMDError
from .resting_state import Checksum, RestingState, dtensor_at_rest, plain_parameter, why_whole
from .resting_tensor import put_back_plain
from .roster import (
    EARLY,
    READS_KEPT,
    FoundState,
    ParamSlot,
    Roster,
    StateSnapshot,
    admit_held,
    admit_hooks,
    admit_inference,
    admit_modules,
    admit_sharing,
    admit_tensor,
    compare_facts,
    facts_of,
    find_state,
    registered,
    slot_names,
    state_tensors,
    tensors_of,
)

# --------------------------------------------------------------------------------------------------------------------
# The report of a step that the engine runs: what is averaged and gathered in a call, in which buckets, and why.


@dataclass(frozen=True)
class BucketLine:
    """One bucket of gradients: the collective that averages it, its size, and its parameters."""

    nbytes: int
    params: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"all_reduce of {size_in_words(self.nbytes)}, {len(self.params)} gradients: {first_names(self.params, 4)}"
        )


@dataclass(frozen=True)
class EngineReport:
    """A summary of the last call of a step. `str()` of it is for people."""

    name: str
    world: int
    calls: int
    parameters: int
    sharded: int
    backwards: tuple[tuple[BucketLine, ...], ...]
    # For each backward, whether its buckets start only at its end.
    late: tuple[bool, ...]
    # Bytes that all ranks get from rank 0.
    buffers: int
    # Bytes of the last call, by what they were.
    gathered: Mapping[str, int]
    # Parameters that "fully_shard" keeps whole, and why.
    whole: Mapping[str, str]
    optimizers: tuple[str, ...]

    @property
    def bytes_per_call(self) -> int:
        """The size of all that one call averages, gathers and broadcasts."""
        averaged = sum(line.nbytes for lines in self.backwards for line in lines)
        return averaged + sum(self.gathered.values()) + self.buffers

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """The lines of the text."""
        yield (
            f"{self.name}: engine on {self.world} ranks, {self.calls} calls, {self.parameters} parameters "
            f"({self.sharded} sharded), {size_in_words(self.bytes_per_call)} per call"
        )
        for number, (lines, late) in enumerate(zip(self.backwards, self.late, strict=True), 1):
            size = sum(line.nbytes for line in lines)
            when = "at its end" if late else "as they fill"
            yield f"  backward {number} averages {size_in_words(size)} in buckets that start {when}"
            yield from (f"    {line}" for line in lines)
        for title, size in self.gathered.items():
            yield f"  {title}: {size_in_words(size)}"
        if self.buffers:
            yield f"  broadcast of buffers: {size_in_words(self.buffers)}"
        yield from (f"  {name} stays whole: {reason}" for name, reason in self.whole.items())
        yield from (f"  {line}" for line in self.optimizers)


def report_of(name: str, world: int, calls: int, roster: Roster, gathered: Mapping[str, int]) -> EngineReport:
    """The report of a step whose last call had this roster."""
    planned = [*roster.plans.get("inside", ()), *roster.plans.get("after", ())]
    plans = [plan for plan in planned if plan is not None]
    return EngineReport(
        name,
        world,
        calls,
        len(roster.params),
        sum(managed.sharded for managed in roster.params),
        tuple(_buckets(plan) for plan in plans),
        tuple(not plan.overlaps for plan in plans),
        roster.shared,
        dict(gathered),
        {m.name: _why_replicated(m) for m in roster.params if roster.shards and not m.sharded},
        tuple(_optimizers(roster)),
    )


def _buckets(plan: BackwardPlan) -> tuple[BucketLine, ...]:
    return tuple(BucketLine(bucket.nbytes, tuple(managed.name for managed in bucket.params)) for bucket in plan.buckets)


def _why_replicated(managed: ManagedParam) -> str:
    if not managed.layout.shape.numel():
        return "it is empty"
    return "no module holds it" if managed.layout.shape else "it has no dimensions"


def _optimizers(roster: Roster) -> Iterator[str]:
    for optimizer in roster.optimizers:
        reason = why_whole(optimizer)
        if not roster.shards:
            yield f"{type(optimizer).__name__} updates whole parameters, as all of them are replicated"
        elif reason is None and optimizer in roster.sparse:
            yield f"{type(optimizer).__name__} updates whole parameters: gradients are sparse"
        elif reason is None:
            yield f"{type(optimizer).__name__} updates the rank's rows"
        else:
            yield f"{type(optimizer).__name__} updates whole parameters: {reason}"


# --------------------------------------------------------------------------------------------------------------------
# Makes rosters: admits what a call has found, lets the ranks agree, and gives all of them rank 0's values.


@dataclass
class RosterPlan:
    """The contents of a roster to be, before anything is changed."""

    mode: DataParallel
    names: list[str]
    tensors: list[torch.Tensor]
    layouts: list[Layout]
    # The identities of the tensors that a module holds.
    in_modules: set[int]
    buffers: list[tuple[str, torch.Tensor]]
    optimizers: list[Optimizer]


class RosterMaker:
    """Makes the rosters of all steps of an engine."""

    def __init__(self, wire: Wire, meeting: MeetingPoint) -> None:
        self.wire, self.meeting = wire, meeting
        self.mesh: DeviceMesh | None = None
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def count_new(self, tensors: list[torch.Tensor], optimizers: list[Optimizer]) -> int:
        """The number of parameters and optimizers that no call has had."""
        fresh = [optimizer for optimizer in optimizers if optimizer not in self.optimizers]
        return len([tensor for tensor in tensors if not self._is_managed(tensor)]) + len(fresh)

    def _is_managed(self, tensor: torch.Tensor) -> bool:
        managed = managed_by(tensor)
        if managed is None or managed.layout.world != self.wire.world:
            return False
        return managed.rests_as_dtensor or managed.kind == (tensor.shape, tensor.dtype)

    def admit(
        self,
        mode: DataParallel,
        found: FoundState,
        slots: list[ParamSlot],
        buffers: list[torch.Tensor],
        tensors: list[torch.Tensor],
    ) -> RosterPlan:
        """Raise an error if the state cannot be made data parallel."""
        admit_modules(found.modules)
        names = {id(tensor): name for name, tensor in slot_names(found.modules)}
        in_modules = {id(slot.value) for slot in slots}
        named = [(names.get(id(tensor), f"parameter {i}"), tensor) for i, tensor in enumerate(tensors)]
        named_buffers = [(names.get(id(buffer), "a buffer"), buffer) for buffer in buffers]
        for name, tensor in (*named, *named_buffers):
            admit_tensor(name, tensor)
        layouts = [self._layout(mode, name, tensor, id(tensor) in in_modules) for name, tensor in named]
        sharded = [pair for pair, layout in zip(named, layouts, strict=True) if layout.sharded]
        admit_inference(named if mode.between == "dtensor" else sharded)
        admit_sharing(
            sharded, [*named, *slot_names(found.modules), *(("a tensor of the step", t) for t in found.tensors)]
        )
        return RosterPlan(
            mode, [name for name, _ in named], tensors, layouts, in_modules, named_buffers, found.optimizers
        )

    def _layout(self, mode: DataParallel, name: str, tensor: torch.Tensor, in_module: bool) -> Layout:
        # Nothing can hold its rows between calls.
        if not in_module:
            return Layout(torch.Size(tensor.shape), False, self.wire.rank, self.wire.world)
        layout = mode.layout_of(name, tensor, self.wire.rank, self.wire.world)
        managed = managed_by(tensor)
        if managed is not None and self._is_managed(tensor) and managed.sharded != layout.sharded:
            raise SPMDError(
                f"Parameter {name} is {'sharded' if managed.sharded else 'replicated'} by another compiled step.",
                remedy='Use the same parallel_style in both steps, or parallel_style="default" in the second.',
            )
        return layout

    def make(self, plan: RosterPlan, is_new: bool) -> Roster:
        """Let the ranks agree, then change the state."""
        fresh = [optimizer for optimizer in plan.optimizers if optimizer not in self.optimizers]
        if is_new and self.wire.world > 1:
            self.meeting.meet(checksum=False)
            params = [*zip(plan.names, plan.tensors, strict=True)]
            compare_facts(self.wire.gather_objects(facts_of(params, plan.buffers, fresh)))
            self._take_over(plan, fresh)
        self.optimizers.update(fresh)
        pairs = [
            self._manage(plan, name, tensor, layout)
            for name, tensor, layout in zip(plan.names, plan.tensors, plan.layouts, strict=True)
        ]
        params_ = [managed for managed, _ in pairs]
        return Roster(
            params_,
            [rest for _, rest in pairs],
            plan.optimizers,
            BucketStore(params_, plan.mode.bucket_bytes),
            [buffer for _, buffer in plan.buffers],
        )

    @torch.no_grad()
    def _take_over(self, plan: RosterPlan, fresh: list[Optimizer]) -> None:
        """Give all ranks rank 0's values, and the mean of the gradients that exist."""
        params = [t for t in plan.tensors if not self._is_managed(t) and not isinstance(t, DTensor)]
        states = [state for state in state_tensors(fresh) if not isinstance(state, DTensor)]
        self.wire.broadcast([*params, *(buffer for _, buffer in plan.buffers), *states], self.meeting.device)
        present = self.wire.gather_objects([param.grad is not None for param in params])
        for param, has in zip(params, zip(*present, strict=True), strict=True):
            if any(has):
                self._average_gradient(param)

    def _average_gradient(self, param: torch.Tensor) -> None:
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        mean = (dense.resolve_conj() / self.wire.world).contiguous()
        self.wire.add(mean).wait()
        param.grad = mean if grad.layout is torch.strided else mean.to_sparse(grad.sparse_dim())

    def _manage(
        self, plan: RosterPlan, name: str, tensor: torch.Tensor, layout: Layout
    ) -> tuple[ManagedParam, torch.Tensor]:
        known = managed_by(tensor)
        if known is not None and self._is_managed(tensor):
            return known, tensor
        if isinstance(tensor, DTensor):
            return plain_parameter(tensor, layout, name), tensor
        if layout.sharded or (plan.mode.between == "dtensor" and id(tensor) in plan.in_modules):
            return dtensor_at_rest(tensor, layout, name, self._mesh(plan, tensor))
        if known is not None:
            known.layout, known.kind = layout, (tensor.shape, tensor.dtype)
            return known, tensor
        return manage_parameter(tensor, layout, name), tensor

    def _mesh(self, plan: RosterPlan, tensor: Any) -> DeviceMesh:
        if self.mesh is None:
            meshes = [param.device_mesh for param in plan.tensors if isinstance(param, DTensor)]
            self.mesh = meshes[0] if meshes else init_device_mesh(tensor.device.type, (dist.get_world_size(),))
        return self.mesh


# --------------------------------------------------------------------------------------------------------------------
# The engine of one group of ranks: what happens before and after the user's Python in each call of a step.


class StepHistory:
    """The calls of one compiled step so far."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0
        # The last one is that of the last call.
        self.rosters: list[Roster] = []
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
        found = find_state(step.function, args, kwargs)
        undo = self._undo_of(step, found)
        try:
            return self._run(step, mode, found, args, kwargs)
        except SPMDError:
            if undo is not None:
                undo()
            raise

    def _undo_of(self, step: Any, found: FoundState) -> Callable[[], None] | None:
        """A function that undoes a call which may be refused when it has changed something.

        It may do so if its inputs are computed from parameters of others, or if it trains under `no_grad`.
        """
        has_gradients = torch.is_grad_enabled()
        behind = unmanaged_parameters(found.inputs, ()) if has_gradients else []
        if has_gradients and not behind:
            return None
        tensors = tensors_of(registered(found.modules)[0], found.optimizers)
        own = {id(tensor) for tensor in tensors if not isinstance(tensor, DTensor)}
        if own.issuperset(map(id, behind)) and (has_gradients or not self._may_train(step)):
            return None
        fresh = [tensor for tensor in tensors if managed_by(tensor) is None]
        optimizers = [optimizer for optimizer in found.optimizers if optimizer not in self.maker.optimizers]
        before = StateSnapshot(found, behind)

        def undo() -> None:
            history = self.history_of(step)
            for managed in filter(None, map(managed_by, fresh)):
                put_back_plain(managed.plain)
                forget_parameter(managed)
            for roster in history.rosters:
                roster.take_sums()
            if (fresh or optimizers) and history.rosters:
                self.forget(history.rosters[-1], history, optimizers)
            before.restore()

        return undo

    def _may_train(self, step: Any) -> bool:
        """Has a step called `backward()` in its last call, if it has been called?"""
        rosters = self.history_of(step).rosters
        return not rosters or rosters[-1].plan_of("inside", 0) is not None

    def _run(self, step: Any, mode: DataParallel, found: FoundState, args: Any, kwargs: Any) -> Any:
        with torch.inference_mode(False):
            roster = self._enter(step, mode, found)
        failed, result = True, None
        try:
            result = self._run_python(step, roster, args, kwargs)
            failed = False
        finally:
            with torch.inference_mode(False):
                self._leave(roster, found, failed)
        if not roster.rests:
            return result
        _refuse_later_backward(result)
        return _with_resting_parameters(result) if roster.shards else result

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

    def _enter(self, step: Any, mode: DataParallel, found: FoundState) -> Roster:
        """Begin a call: take its state, and meet the other ranks."""
        record = self.history_of(step)
        # Its first bucket opens the call.
        opening = record.rosters[-1].opening if record.rosters else None
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
        return roster

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
        reads = _held_gradients(tensors) | (0 if roster is None else roster.reads)
        header = CallHeader(record.number, record.calls, 0, new, len(tensors), reads=reads)
        self.meeting.begin(header, device, checksum, opening)
        try:
            plan = None if roster is not None else self.maker.admit(mode, found, slots, buffers, tensors)
            if roster is None or roster.rests:
                with disable_torch_function():
                    admit_hooks(tensors)
                admit_held(found.tensors)
                _admit_graphs(found.inputs, tensors)
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
        checksum = self.checksum.of([managed.plain for managed in roster.params if not managed.sharded], record.calls)
        sums = [*roster.take_sums(), *([] if checksum is None else [checksum])]
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
            roster.shared = sum(buffer.nbytes for buffer in roster.buffers if buffer.layout is torch.strided)
            with torch.no_grad(), mark_work("buffers of rank 0", roster.shared):
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
                    # Ranks may have failed at different points.
                    roster.take_sums()
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


def _admit_graphs(inputs: Iterable[torch.Tensor], params: Iterable[torch.Tensor]) -> None:
    """Refuse inputs that were computed from the DTensors of parameters, whose gradients are not those of the step."""
    behind = parameters_behind(inputs) if torch.is_grad_enabled() else []
    own = {id(param) for param in params} if behind else set()
    for managed in (managed_by(leaf) for leaf in behind if id(leaf) in own):
        if managed is not None and managed.rests_as_dtensor:
            raise SPMDError(
                f"A tensor that the step gets was computed from parameter {managed.name} between calls, with a graph.",
                remedy="Compute it in the step, or detach it.",
            )


def _held_gradients(tensors: Iterable[torch.Tensor]) -> int:
    """Reads of gradients of the last call, if something else than the parameters has kept one: it is to show them."""
    references = [managed.memory_of_gradient for managed in map(managed_by, tensors) if managed is not None]
    return READS_KEPT * any(reference is not None and reference.is_alive() for reference in references)


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


def _with_resting_parameters(result: Any) -> Any:
    """The result of a step, with the parameters in it as the model holds them between calls."""

    def resting(leaf: Any) -> Any:
        managed = managed_by(leaf) if isinstance(leaf, torch.nn.Parameter) else None
        return leaf if managed is None or leaf is not managed.plain else managed.rest

    leaves, spec = tree().tree_flatten(result)
    outward = [resting(leaf) for leaf in leaves]
    is_same = all(mine is leaf for mine, leaf in zip(outward, leaves, strict=True))
    return result if is_same else tree().tree_unflatten(outward, spec)


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


# --------------------------------------------------------------------------------------------------------------------
# A step that the engine runs.


class EngineStep:
    """A train step whose state is data parallel. Calling it runs the user's Python."""

    def __init__(self, function: Callable[..., Any], mode: DataParallel) -> None:
        functools.update_wrapper(self, function)
        self.function, self.mode = function, mode
        self.name: str = getattr(function, "__name__", type(function).__name__)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return current_engine().call(self, self.mode, args, kwargs)

    def report(self) -> EngineReport:
        """Summarize the last call: what is averaged and gathered, in which buckets, and what runs whole."""
        return current_engine().report(self)

    def picture(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record the calls in a context of all ranks; rank 0 writes them to `path`, which Perfetto opens."""
        wire = current_engine().wire
        return record_picture(wire.rank, wire.gather_objects, path)
