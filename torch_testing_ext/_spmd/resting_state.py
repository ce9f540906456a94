"""The state between calls: rows of parameters, gathered for a step, updated by optimizers."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_testing_ext._process.words import grouped
from torch_testing_ext._torch.tracing import (
    MemoryReference,
    disable_torch_function,
    holders_of_memory,
    local_tensor,
    optimizer_has_hooks,
    outside_dynamo,
    set_local_tensor,
    storage_key,
    version_of,
)

from .averaging import MeetingPoint, ReadWatch
from .gradient_buckets import ManagedParam, Wire, manage_parameter, managed_by, mark_work, plan_buckets
from .parallel_modes import Layout, SPMDError
from .resting_tensor import (
    in_call,
    note_write_of_rows,
    put_back_plain,
    replace_plain,
    rest_as,
    resting_like,
)
from .roster import READS_KEPT, READS_UPDATED, ParamSlot, Roster, refuse_held, registered

# --------------------------------------------------------------------------------------------------------------------
# A checksum of parameters, which ranks compare: of all elements of small ones, and of a sample of large ones.
#
# The sample moves from call to call. The sum is one of bit patterns, so that it is exact, and NaN equals NaN.

# A parameter of at most so many elements is summed whole.
_WHOLE = 1024
_SAMPLE = 256
# Views of so many samples are kept.
_TURNS = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """Sums samples of the same tensors again and again, and keeps the views."""

    def __init__(self) -> None:
        self._places: tuple[tuple[int, torch.Size], ...] = ()
        # By turn: the views of one dtype and device together.
        self._views: dict[int, list[list[torch.Tensor]]] = {}

    def of(self, tensors: Sequence[torch.Tensor], turn: int) -> torch.Tensor | None:
        """A tensor with the sum; None if there is nothing to sum."""
        places = tuple([(tensor.data_ptr(), tensor.shape) for tensor in tensors])
        if places != self._places:
            self._places = places
            self._views = {}
        turn %= _TURNS
        if turn not in self._views:
            views = [sampled_elements(tensor, turn) for tensor in tensors if tensor.numel()]
            by_kind = grouped(((view.dtype, view.device), view) for view in views)
            self._views[turn] = list(by_kind.values())
        sums = [torch.cat(alike).sum(dtype=torch.int64) for alike in self._views[turn]]
        if not sums:
            return None
        return sum(sums[1:], start=sums[0])


def sampled_elements(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """A view of some elements of a tensor, as integers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    if not tensor.is_contiguous():
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in strides)
        # Of a tensor with gaps or overlaps, one element: the memory is not all its own.
        count = reach if reach == tensor.numel() else 1
        tensor = tensor.as_strided((count,), (1,))
    flat = tensor.view(-1)
    if flat.numel() > _WHOLE:
        gap = flat.numel() // _SAMPLE
        flat = flat[turn * gap // _TURNS :: gap]
    return flat.view(_INTEGERS[flat.element_size()])


def checksum_of(tensors: Sequence[torch.Tensor], turn: int = 0) -> torch.Tensor | None:
    """The checksum of tensors that will not be summed again."""
    return Checksum().of([tensor for tensor in tensors if tensor.layout is torch.strided], turn)


# --------------------------------------------------------------------------------------------------------------------
# Gathers rows: fills whole tensors, of which each rank has its own rows, with those of all ranks.

_BUCKET_BYTES = 32 * 2**20
# From this size on, rows travel without a copy.
_DIRECT_BYTES = 256 * 1024


@dataclass
class RowGather:
    """One gather: the rank's rows, and the whole tensor to fill."""

    managed: ManagedParam
    rows: torch.Tensor
    whole: torch.Tensor


def gather_rows(wire: Wire, gathers: Iterable[RowGather]) -> None:
    """Gather into all whole tensors."""
    small, works = [], []
    for gather in gathers:
        if wire.world == 1:
            gather.whole.copy_(gather.rows)
        elif _is_direct(gather):
            works.append(wire.start_gather(gather.whole.view(-1), gather.rows.reshape(-1)))
        else:
            small.append(gather)
    sizes = [gather.whole.nbytes for gather in small]
    kinds = [(gather.whole.dtype, gather.whole.device) for gather in small]
    buckets = [_start(wire, [small[i] for i in some]) for some in plan_buckets(sizes, kinds, _BUCKET_BYTES)]
    for work in works:
        work.wait()
    for some, got, work in buckets:
        work.wait()
        _unpack(wire, some, got)


def _is_direct(gather: RowGather) -> bool:
    is_large = gather.whole.nbytes >= _DIRECT_BYTES
    return is_large and gather.managed.layout.even and gather.whole.is_contiguous()


def _start(wire: Wire, gathers: list[RowGather]) -> tuple[list[RowGather], torch.Tensor, Any]:
    sizes = _sizes(gathers)
    like = gathers[0].whole
    mine = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
    for gather, part in zip(gathers, mine.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        part[: gather.rows.numel()].view(gather.rows.shape).copy_(gather.rows)
    got = mine.new_empty(wire.world * len(mine))
    return gathers, got, wire.start_gather(got, mine)


def _unpack(wire: Wire, gathers: Sequence[RowGather], got: torch.Tensor) -> None:
    sizes = _sizes(gathers)
    for rank, block in enumerate(got.chunk(wire.world)):
        for gather, part in zip(gathers, block.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            theirs = gather.managed.rows(gather.whole, rank)
            theirs.copy_(part[: theirs.numel()].view(theirs.shape))


def _sizes(gathers: Sequence[RowGather]) -> list[int]:
    return [gather.managed.layout.padded_numel for gather in gathers]


# --------------------------------------------------------------------------------------------------------------------
# Runs an elementwise optimizer of torch on the rank's rows of parameters, gradients and states.

# Each element of their updates depends on that element alone.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adamax"]
)


def why_whole(optimizer: Optimizer) -> str | None:
    """Why an optimizer must run on whole tensors; None if it may run on rows."""
    if type(optimizer) not in _ELEMENTWISE:
        return "it is none of torch's elementwise optimizers"
    if optimizer_has_hooks(optimizer):
        return "it has hooks, which see whole parameters"
    inner = optimizer.__dict__.get("step")
    if inner is not None and not hasattr(inner, "_wrapped_by_lr_sched"):
        return "its step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    return None


def rekey(optimizer: Optimizer, form: Callable[[Any], Any]) -> None:
    """Put another form of each parameter into an optimizer, in its groups and as keys of its state."""
    for group in optimizer.param_groups:
        group["params"][:] = [form(param) for param in group["params"]]
    items = [(form(key), value) for key, value in optimizer.state.items()]
    for _, values in items:
        if isinstance(values, dict):
            values.update({name: form(value) for name, value in values.items() if isinstance(value, nn.Parameter)})
    optimizer.state.clear()
    optimizer.state.update(items)


class RowOptimizer:
    """Stands for `optimizer.step` in a call. Between updates the states are DTensors."""

    def __init__(
        self,
        optimizer: Optimizer,
        watch: ReadWatch,
        add_sums: Callable[[list[torch.Tensor]], None],
        after_update: Callable[[], None],
    ) -> None:
        self.optimizer, self.watch = optimizer, watch
        self._add_sums, self._after_update = add_sums, after_update
        self._had_own = "step" in optimizer.__dict__
        self._inner: Callable[..., Any] = optimizer.step
        self._active, self.ran_whole = False, False
        self._zero_grad: Callable[..., None] | None = None

    def install(self) -> None:
        """Replace the optimizer's step."""

        @outside_dynamo
        def step(closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            return self._step(closure, *args, **kwargs)

        if hasattr(self._inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True
        self._ours = step
        self._active = True
        self.optimizer.__dict__["step"] = step
        self._replace_zero_grad()

    def _replace_zero_grad(self) -> None:
        """Stop watching after `zero_grad`, which most often drops all that was watched."""
        if "zero_grad" in self.optimizer.__dict__:
            return
        inner = self.optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            if self._active:
                self.watch.rest()

        self._zero_grad = self.optimizer.__dict__["zero_grad"] = zero_grad

    def uninstall(self) -> None:
        """Restore the optimizer's step, unless something has wrapped ours meanwhile: then ours passes calls on."""
        self._active = False
        if self._zero_grad is not None and self.optimizer.__dict__.get("zero_grad") is self._zero_grad:
            del self.optimizer.__dict__["zero_grad"]
        if self.optimizer.__dict__.get("step") is self._ours:
            if self._had_own:
                self.optimizer.__dict__["step"] = self._inner
            else:
                del self.optimizer.__dict__["step"]

    def _step(self, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer on the rows of this rank."""
        if not self._active:
            return self._inner(*args, **kwargs) if closure is None else self._inner(closure, *args, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [managed_by(p) for group in self.optimizer.param_groups for p in group["params"]]
        sharded = [managed for managed in params if managed is not None and managed.sharded]
        with self.watch.pausing():
            is_sparse = any(_is_sparse(managed.plain.grad) for managed in sharded)
        if is_sparse:
            # The watch gathers those of earlier calls.
            _ = [managed.plain.grad for managed in sharded]
            self.watch.settle()
            self.ran_whole = True
            form = self._whole(sharded)
        else:
            form = self._rows(sharded)
        with self.watch.pausing(), form:
            result = self._inner(*args, **kwargs)
        self._after_update()
        return loss if closure is not None else result

    @contextmanager
    def _whole(self, sharded: list[ManagedParam]) -> Iterator[None]:
        """Let states be whole, for sparse gradients: rows of them would be dense, and mean something else."""
        make_states_whole(self.optimizer)
        yield
        shard_states(self.optimizer, sharded)

    @contextmanager
    def _rows(self, sharded: list[ManagedParam]) -> Iterator[None]:
        """Let parameters, gradients and states be the rank's rows."""
        rows = [_Rows(managed, self.optimizer) for managed in sharded]
        with torch.no_grad():
            wholes = [managed.plain.detach() for managed in sharded]
            wholes += [managed.plain.grad for managed in sharded if managed.plain.grad is not None]
            self._add_sums([whole for whole in wholes if storage_key(whole) not in self.watch.stale])
            for rows_of_param in rows:
                rows_of_param.enter()
        try:
            yield
        finally:
            with torch.no_grad():
                for rows_of_param in rows:
                    for whole in rows_of_param.leave():
                        self.watch.stale[storage_key(whole)] = rows_of_param.managed, whole


class _Rows:
    """One parameter while its optimizer runs on rows."""

    def __init__(self, managed: ManagedParam, optimizer: Optimizer) -> None:
        self.managed, self.optimizer = managed, optimizer
        self.whole: torch.Tensor = managed.plain.data
        self._grad: torch.Tensor | None = None
        self._states: dict[str, DTensor] = {}
        self._had_gradient, self._version = False, 0

    def enter(self) -> None:
        plain, managed = self.managed.plain, self.managed
        self._grad = plain.grad
        rows = managed.kept
        if self._grad is not None:
            rows = managed.rows(self._grad)
            self._version = version_of(self._grad)
        plain.grad = None
        plain.data = managed.rows(self.whole)
        plain.grad = rows
        self._had_gradient = rows is not None
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            if isinstance(value, DTensor):
                self._states[name] = value
                values[name] = local_tensor(value)
            elif isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == self.whole.shape:
                values[name] = managed.layout.local_part(value.to_dense() if _is_sparse(value) else value)

    def leave(self) -> list[torch.Tensor]:
        """Return to the whole tensors. Returns those of which the rank's rows may have changed."""
        plain, rest = self.managed.plain, self.managed.rest
        shape = plain.shape
        plain.grad = None
        plain.data = self.whole
        plain.grad = self._grad
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            before = self._states.get(name)
            if before is not None and local_tensor(before) is value:
                values[name] = before
            elif isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                values[name] = resting_like(rest, value)
        changed = [self.whole] if self._had_gradient else []
        if self._grad is not None and version_of(self._grad) != self._version:
            # Some optimizers use it as a buffer.
            changed.append(self._grad)
        return changed


def _is_sparse(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided


def shard_states(optimizer: Optimizer, sharded: Iterable[ManagedParam]) -> None:
    """Keep the rank's rows of states that are whole."""
    for managed in sharded:
        values = optimizer.state.get(managed.plain) or optimizer.state.get(managed.rest) or {}
        for name, value in list(values.items()):
            is_whole = isinstance(value, torch.Tensor) and value.dim() and value.shape == managed.layout.shape
            if is_whole and not isinstance(value, DTensor) and not _is_sparse(value):
                values[name] = resting_like(managed.rest, managed.layout.local_part(value))


def make_states_whole(optimizer: Optimizer) -> None:
    """Gather states that are sharded."""
    for values in optimizer.state.values():
        if isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, DTensor):
                    values[name] = value.full_tensor()


# --------------------------------------------------------------------------------------------------------------------
# The state between calls: the model and its optimizers hold DTensors; in a call they hold whole, plain parameters.


def dtensor_at_rest(plain: torch.Tensor, layout: Layout, name: str, mesh: DeviceMesh) -> tuple[ManagedParam, DTensor]:
    """Create the DTensor that stands for a parameter between calls."""
    _refuse_updates_between_calls()
    values = plain.detach().resolve_conj().resolve_neg()
    local = layout.local_part(values) if layout.sharded else plain.detach()
    rest = resting_parameter(local, layout, plain, mesh)
    rest.__dict__.update(plain.__dict__)
    managed = manage_parameter(plain, layout, name, rest)
    if layout.sharded and not (plain.is_conj() or plain.is_neg()):
        # What shares it already goes on to show the parameter.
        managed.memory = MemoryReference(plain)
    if plain.grad is not None:
        dense = plain.grad if plain.grad.layout is torch.strided else plain.grad.to_dense()
        rest.grad = resting_like(rest, layout.local_part(dense))
    return managed, rest


@functools.cache
def _refuse_updates_between_calls() -> None:
    """Let optimizers refuse to step on parameters in the form that is not in use: they would skip them silently."""

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            managed = managed_by(param)
            if managed is None or not managed.rests_as_dtensor:
                continue
            if managed.at_rest and param is managed.plain:
                raise SPMDError(
                    f"{type(optimizer).__name__} steps outside of the compiled step on parameter {managed.name}, whose "
                    "place in the model a DTensor has taken.",
                    remedy="Let the compiled step have the optimizer, or create it after the first call.",
                )
            if not managed.at_rest and param is managed.rest:
                refuse_held(managed, f"{type(optimizer).__name__}, which the step has not found, updates")

    register_optimizer_step_pre_hook(refuse)


def plain_parameter(rest: DTensor, layout: Layout, name: str) -> ManagedParam:
    """Create the plain parameter for a DTensor that the engine has not made."""
    local = local_tensor(rest_as(rest))
    whole = local if not layout.sharded else local.new_empty(0)
    return manage_parameter(nn.Parameter(whole, requires_grad=rest.requires_grad), layout, name, rest)


def with_part(local: torch.Tensor, layout: Layout, like: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor of the shape of `like` with this part."""
    return DTensor.from_local(
        local, mesh, [layout.placement], run_check=False, shape=torch.Size(like.shape), stride=like.stride()
    )


def resting_parameter(local: torch.Tensor, layout: Layout, like: torch.Tensor, mesh: DeviceMesh) -> Any:
    """A parameter between calls with this part."""
    return rest_as(nn.Parameter(with_part(local, layout, like, mesh), requires_grad=like.requires_grad))


def put_parameter(module: nn.Module, name: str, value: Any) -> None:
    """Register a parameter, also in the second list of weights that recurrent modules keep."""
    module._parameters[name] = value
    if isinstance(module, nn.RNNBase) and "_flat_weights" in module.__dict__:
        module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]


class RestingState:
    """Changes the state of one roster from its form between calls to that of a call, and back."""

    def __init__(self, wire: Wire, meeting: MeetingPoint) -> None:
        self.wire, self.meeting = wire, meeting
        self.watch = ReadWatch(self._gather_kept, self.settle)
        self.roster: Roster | None = None
        self.rests: list[Any] = []
        self._steps: list[RowOptimizer] = []
        # Of each of `rests`, when the call began.
        self._grads: list[tuple[int, int]] = []
        self.bytes: dict[str, int] = {}

    # -- into a call

    @torch.no_grad()
    def enter(self, roster: Roster, slots: Iterable[ParamSlot]) -> None:
        """Let modules and optimizers hold whole, plain parameters."""
        self.roster, self.bytes, self.watch.noticed, self._has_met = roster, {}, 0, False
        resting = [managed for managed in roster.params if managed.rests_as_dtensor]
        self.rests = [managed.rest for managed in resting]
        with self.watch.pausing():
            self._enter(roster, slots, resting)
        for managed, rest in zip(resting, self.rests, strict=True):
            if managed.sharded:
                in_call[storage_key(local_tensor(rest))] = managed
        self.watch.start()

    def _enter(self, roster: Roster, slots: Iterable[ParamSlot], resting: list[ManagedParam]) -> None:
        self._fill(resting)
        self._grads = [_gradient_of(rest) for rest in self.rests]
        for managed, rest in zip(resting, self.rests, strict=True):
            self._take_gradient(managed, rest)
        kept = [id(managed.kept) for managed in resting if managed.kept is not None]
        # One rank has no buckets, which add them; they would add a gradient of two parameters twice.
        if roster.is_eager(READS_KEPT) or self.wire.world == 1 or len({*kept}) < len(kept):
            self._gather_kept()
            if roster.reads & READS_KEPT:
                self.watch.kept.clear()
        for slot in slots:
            found = managed_by(slot.value)
            if found is not None and found.rests_as_dtensor:
                put_parameter(slot.module, slot.name, found.plain)
        for optimizer in roster.optimizers:
            self._enter_optimizer(optimizer)

    def _fill(self, resting: list[ManagedParam]) -> None:
        gathers = []
        for managed, rest in zip(resting, self.rests, strict=True):
            plain, local, managed.at_rest = managed.plain, local_tensor(rest), False
            managed.set_rest(rest)
            put_back_plain(plain)
            plain.requires_grad_(rest.requires_grad)
            if len(rest.__dict__) > 1:
                plain.__dict__.update({k: v for k, v in rest.__dict__.items() if k != "_is_param"})
            if managed.sharded:
                whole = _memory_for(managed.memory, rest, local.dtype)
                gathers.append(RowGather(managed, local, whole))
                plain.data = whole
            elif plain.data_ptr() != local.data_ptr():
                plain.data = local
        self._gather("gather of parameters", gathers)

    def _take_gradient(self, managed: ManagedParam, rest: Any) -> None:
        grad, managed.plain.grad = rest.grad, None
        if grad is None:
            return
        local = local_tensor(grad) if isinstance(grad, DTensor) else grad
        if managed.sharded:
            managed.kept = local
            self.watch.kept[id(managed.plain)] = managed
        else:
            managed.plain.grad = local

    def _enter_optimizer(self, optimizer: Optimizer) -> None:
        rekey(optimizer, _form_of(lambda managed: managed.plain))
        if any(managed_by(p).sharded for group in optimizer.param_groups for p in group["params"]):  # type: ignore[union-attr]
            whole = why_whole(optimizer)
            if whole is not None:
                make_states_whole(optimizer)
            else:
                step = RowOptimizer(optimizer, self.watch, self.add_sums, self._after_update)
                step.install()
                self._steps.append(step)

    # -- reads in a call

    def _gather_kept(self) -> None:
        assert self.roster is not None
        # By the identity of the rows: parameters may share one gradient.
        gathers: dict[int, RowGather] = {}
        holders = [managed for managed in self.roster.params if managed.kept is not None]
        with torch.inference_mode(False), torch.no_grad():
            for managed in holders:
                rows: torch.Tensor = managed.kept  # type: ignore[assignment]
                whole = _memory_for(managed.memory_of_gradient, managed.plain, rows.dtype)
                gathers.setdefault(id(rows), RowGather(managed, rows, whole))
            self._gather("gather of kept gradients", [*gathers.values()])
            for managed in holders:
                whole, grad = gathers[id(managed.kept)].whole, managed.plain.grad
                managed.plain.grad = whole if grad is None else whole.add_(grad)
                managed.kept = None

    def _after_update(self) -> None:
        """Gather what an optimizer has updated, or wait for a read of it."""
        assert self.roster is not None
        if self.roster.is_eager(READS_UPDATED):
            updated = set() if self.roster.reads & READS_UPDATED else {*self.watch.stale}
            with self.watch.pausing():
                self.settle(True)
            self.watch.updated |= updated
        self.watch.start()

    def settle(self, reads: bool, ends: bool = False) -> None:
        """Meet the other ranks if parameters are stale, or when a call ends without. Gather if any rank reads them."""
        stale = len(self.watch.stale)
        if stale or (ends and not self._has_met):
            self._has_met = True
            if self.wire.world == 1 or self.meeting.settle(reads, stale):
                self._gather_rows()

    def _gather_rows(self) -> None:
        stale, self.watch.stale = self.watch.stale, {}
        with torch.inference_mode(False), torch.no_grad():
            gathers = []
            for managed, whole in stale.values():
                gathers.append(RowGather(managed, managed.rows(whole).clone(), whole))
            self._gather("gather of updated parameters", gathers)

    def add_sums(self, tensors: list[torch.Tensor]) -> None:
        """Sum whole values, which must be the same on all ranks: the next call compares them."""
        checksum = checksum_of(tensors)
        if checksum is not None and self.roster is not None:
            self.roster.sums.append(checksum)

    def _gather(self, title: str, gathers: list[RowGather]) -> None:
        size = sum(gather.whole.nbytes for gather in gathers)
        if size:
            self.bytes[title] = self.bytes.get(title, 0) + size
        with mark_work(title, size):
            gather_rows(self.wire, gathers)

    # -- out of a call

    @torch.no_grad()
    def leave(self, roots: Iterable[nn.Module], failed: bool) -> None:
        """Let modules and optimizers hold DTensors again, with the values of now, which aliases show as well."""
        assert self.roster is not None
        in_call.clear()
        note_write_of_rows()
        try:
            with self.watch.pausing():
                if not failed:
                    self.settle(self._shows_stale(), ends=self.roster.shards)
                self._leave(self.roster, roots)
        finally:
            self.watch.stop()
            self.roster.take([managed.rest for managed in self.roster.params])
            self.rests, self.roster = [], None

    def _shows_stale(self) -> bool:
        """Does something else hold the memory of a parameter whose rows are newer?"""
        for managed, whole in self.watch.stale.values():
            is_parameter = storage_key(managed.plain) == storage_key(whole)
            if holders_of_memory(whole) > 1 + is_parameter:
                return True
        return False

    def _leave(self, roster: Roster, roots: Iterable[nn.Module]) -> None:
        """End a call: give the model its resting parameters again, and release the whole ones."""
        roster.calls += 1
        roster.reads = roster.reads | self.watch.noticed
        roster.sparse = [step.optimizer for step in self._steps if step.ran_whole]
        for step in self._steps:
            step.uninstall()
        self._steps = []
        resting = [managed for managed in roster.params if managed.rests_as_dtensor]
        current = [managed.plain for managed in resting if managed.sharded]
        self.add_sums([plain for plain in current if storage_key(plain) not in self.watch.stale])
        pairs = zip(resting, self.rests, self._grads, strict=True)
        reached = [managed.name for managed, rest, grad in pairs if _gradient_of(rest) != grad]
        # By the identity of the gradient: parameters may share one.
        grads: dict[int, Any] = {}
        for position, managed in enumerate(resting):
            self.rests[position] = self._leave_param(managed, self.rests[position], grads)
        for slot in registered(roots)[0]:
            found = managed_by(slot.value)
            if found is not None and found.rests_as_dtensor and slot.value is not found.rest:
                put_parameter(slot.module, slot.name, found.rest)
        for optimizer in roster.optimizers:
            rekey(optimizer, _form_of(lambda managed: managed.rest))
        for managed in resting:
            free_memory(managed)
        if reached:
            raise SPMDError(
                f"A backward of the step reached parameter {reached[0]} through an operation between calls.",
                remedy="Compute it in the step, or detach it.",
            )

    def _leave_param(self, managed: ManagedParam, rest: Any, grads: dict[int, Any]) -> Any:
        plain, local = managed.plain, local_tensor(rest)
        data = plain.detach()
        if data.shape != rest.shape or data.dtype != local.dtype or data.device != local.device:
            rest = self._replace_rest(managed, rest, data)
        elif managed.sharded:
            local.copy_(managed.rows(data))
        elif data.data_ptr() != local.data_ptr():
            set_local_tensor(rest, data)
        if len(plain.__dict__):
            rest.__dict__.update(plain.__dict__)
        rest.requires_grad_(plain.requires_grad)
        self._leave_gradient(managed, rest, grads)
        return rest

    def _leave_gradient(self, managed: ManagedParam, rest: Any, grads: dict[int, Any]) -> None:
        grad = managed.plain.grad
        if grad is not None:
            if id(grad) not in grads:
                dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
                grads[id(grad)] = resting_like(rest, managed.rows(dense).clone() if managed.sharded else dense)
            rest.grad = grads[id(grad)]
        elif managed.kept is None:
            rest.grad = None
        managed.kept = None

    def _replace_rest(self, managed: ManagedParam, old: Any, data: torch.Tensor) -> Any:
        """Create another DTensor: the step has given the parameter another shape or dtype."""
        layout = managed.layout
        managed.layout = Layout(torch.Size(data.shape), layout.sharded and data.dim() > 0, layout.rank, layout.world)
        local = managed.layout.local_part(data)
        rest = resting_parameter(local, managed.layout, data, old.device_mesh)
        rest.requires_grad_(old.requires_grad)
        managed.set_rest(rest)
        return rest


def free_memory(managed: ManagedParam) -> None:
    """Free the memory of a whole parameter at rest. Its graph, if any is left, can no longer be used."""
    managed.at_rest, plain = True, managed.plain
    if managed.sharded:
        grad = plain.grad
        has_memory = grad is not None and grad.layout is torch.strided
        managed.memory = MemoryReference(plain)
        managed.memory_of_gradient = MemoryReference(grad) if has_memory else None
        plain.grad = None
        plain.data = plain.new_empty(0)
    replace_plain(plain)


def _gradient_of(rest: Any) -> tuple[int, int]:
    """The identity of a gradient, and the number of writes to it."""
    grad = rest.grad
    return (0, 0) if grad is None else (id(grad), version_of(grad))


def _memory_for(reference: MemoryReference | None, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a whole tensor: that of the last call, if something shows it, so that it goes on to show this one."""
    with disable_torch_function():
        whole = None if reference is None else reference.tensor(like)
        if whole is not None and whole.dtype == dtype:
            return whole
        device = local_tensor(like).device if isinstance(like, DTensor) else like.device
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)


def _form_of(form: Callable[[ManagedParam], Any]) -> Callable[[Any], Any]:
    """A function that returns one form of a managed parameter, and anything else as it is."""

    def of(param: Any) -> Any:
        managed = managed_by(param) if isinstance(param, torch.Tensor) else None
        return param if managed is None else form(managed)

    return of
