"""The state between calls: the model and its optimizers hold DTensors; in a call they hold whole, plain parameters."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_testing_ext._torch.spmd import dtensor_like, local_tensor, set_local_tensor, storage_key
from torch_testing_ext._utils.rank_traces import mark

from ..param_layout import Layout
from ..spmd_errors import SPMDError
from .admission import refuse_held
from .checksum import sum_of
from .managed_params import ManagedParam, manage, managed_by
from .meeting_point import MeetingPoint
from .read_watch import ReadWatch
from .roster import READS_KEPT, READS_UPDATED, ParamSlot, Roster, registered
from .row_gathers import RowGather, gather_rows
from .row_optimizers import RowOptimizer, make_states_whole, rekey, why_whole
from .wire import Wire


def distribute(plain: torch.Tensor, layout: Layout, name: str, mesh: DeviceMesh) -> tuple[ManagedParam, DTensor]:
    """Create the DTensor that stands for a parameter between calls."""
    _refuse_updates_between_calls()
    values = plain.detach().resolve_conj().resolve_neg()
    local = layout.local_part(values) if layout.sharded else plain.detach()
    rest = nn.Parameter(wrap(local, layout, plain, mesh), requires_grad=plain.requires_grad)
    rest.__dict__.update(plain.__dict__)
    managed = manage(plain, layout, name, rest)
    if plain.grad is not None:
        dense = plain.grad if plain.grad.layout is torch.strided else plain.grad.to_dense()
        rest.grad = dtensor_like(rest, layout.local_part(dense))
    return managed, rest  # type: ignore[return-value]


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


def adopt(rest: DTensor, layout: Layout, name: str) -> ManagedParam:
    """Create the plain parameter for a DTensor that the engine has not made."""
    local = local_tensor(rest)
    whole = local if not layout.sharded else local.new_empty(0)
    return manage(nn.Parameter(whole, requires_grad=rest.requires_grad), layout, name, rest)


def wrap(local: torch.Tensor, layout: Layout, like: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor of the shape of `like` with this part."""
    return DTensor.from_local(
        local, mesh, [layout.placement], run_check=False, shape=torch.Size(like.shape), stride=like.stride()
    )


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
        self.bytes: dict[str, int] = {}

    # -- into a call

    @torch.no_grad()
    def enter(self, roster: Roster, slots: Iterable[ParamSlot]) -> None:
        """Let modules and optimizers hold whole, plain parameters."""
        self.roster, self.bytes, self.watch.noticed, self._has_met = roster, {}, 0, False
        resting = [managed for managed in roster.params if managed.rests_as_dtensor]
        self.rests = [managed.rest for managed in resting]
        self._fill(resting)
        for managed, rest in zip(resting, self.rests, strict=True):
            self._take_gradient(managed, rest)
        if roster.is_eager(READS_KEPT) or self.wire.world == 1:  # one rank has no buckets, which add them
            self._gather_kept()
            if roster.reads & READS_KEPT:
                self.watch.kept.clear()
        for slot in slots:
            found = managed_by(slot.value)
            if found is not None and found.rests_as_dtensor:
                put_parameter(slot.module, slot.name, found.plain)
        for optimizer in roster.optimizers:
            self._enter_optimizer(optimizer)
        self.watch.start()

    def _fill(self, resting: list[ManagedParam]) -> None:
        gathers = []
        for managed, rest in zip(resting, self.rests, strict=True):
            plain, local, managed.at_rest = managed.plain, local_tensor(rest), False
            plain.requires_grad_(rest.requires_grad)
            if len(rest.__dict__) > 1:
                plain.__dict__.update({k: v for k, v in rest.__dict__.items() if k != "_is_param"})
            if managed.sharded:
                whole = torch.empty_strided(rest.shape, rest.stride(), dtype=local.dtype, device=local.device)
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
        gathers = []
        for managed in [m for m in self.roster.params if m.kept is not None]:
            whole = torch.empty_like(managed.plain, dtype=managed.kept.dtype)  # type: ignore[union-attr]
            gathers.append(RowGather(managed, managed.kept, whole))  # type: ignore[arg-type]
        with torch.inference_mode(False), torch.no_grad():
            self._gather("gather of kept gradients", gathers)
            for gather in gathers:
                grad = gather.managed.plain.grad
                gather.managed.plain.grad = gather.whole if grad is None else gather.whole.add_(grad)
                gather.managed.kept = None

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
        found = sum_of(tensors)
        if found is not None and self.roster is not None:
            self.roster.sums.append(found)

    def _gather(self, title: str, gathers: list[RowGather]) -> None:
        size = sum(gather.whole.nbytes for gather in gathers)
        if size:
            self.bytes[title] = self.bytes.get(title, 0) + size
        with mark(title, size):
            gather_rows(self.wire, gathers)

    # -- out of a call

    @torch.no_grad()
    def leave(self, roots: Iterable[nn.Module], failed: bool) -> None:
        """Let modules and optimizers hold DTensors again, with the values of now."""
        assert self.roster is not None
        try:
            with self.watch.pausing():
                self._leave(self.roster, roots, failed)
        finally:
            self.watch.stop()
            self.roster.tensors = [managed.rest for managed in self.roster.params]
            self.rests, self.roster = [], None

    def _leave(self, roster: Roster, roots: Iterable[nn.Module], failed: bool) -> None:
        """End a call: give the model its resting parameters again, and release the whole ones."""
        if not failed:
            self.settle(False, ends=roster.shards)
        roster.calls, roster.reads = roster.calls + 1, roster.reads | self.watch.noticed
        roster.sparse = [step.optimizer for step in self._steps if step.ran_whole]
        for step in self._steps:
            step.uninstall()
        self._steps = []
        resting = [managed for managed in roster.params if managed.rests_as_dtensor]
        self.add_sums([m.plain for m in resting if m.sharded and storage_key(m.plain) not in self.watch.stale])
        for position, managed in enumerate(resting):
            self.rests[position] = self._leave_param(managed, self.rests[position])
        for slot in registered(roots)[0]:
            found = managed_by(slot.value)
            if found is not None and found.rests_as_dtensor and slot.value is not found.rest:
                put_parameter(slot.module, slot.name, found.rest)
        for optimizer in roster.optimizers:
            rekey(optimizer, _form_of(lambda managed: managed.rest))
        for managed in resting:
            empty(managed)

    def _leave_param(self, managed: ManagedParam, rest: Any) -> Any:
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
        self._leave_gradient(managed, rest)
        return rest

    def _leave_gradient(self, managed: ManagedParam, rest: Any) -> None:
        grad = managed.plain.grad
        if grad is not None:
            dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
            rest.grad = dtensor_like(rest, managed.rows(dense).clone() if managed.sharded else dense)
        elif managed.kept is None:
            rest.grad = None
        managed.kept = None

    def _replace_rest(self, managed: ManagedParam, old: Any, data: torch.Tensor) -> Any:
        """Create another DTensor: the step has given the parameter another shape or dtype."""
        layout = managed.layout
        managed.layout = Layout(torch.Size(data.shape), layout.sharded and data.dim() > 0, layout.rank, layout.world)
        local = managed.layout.local_part(data)
        rest = nn.Parameter(wrap(local, managed.layout, data, old.device_mesh), requires_grad=old.requires_grad)
        managed.set_rest(rest)
        return rest


def empty(managed: ManagedParam) -> None:
    """Free the memory of a whole parameter at rest. Its graph, if any is left, can no longer be used."""
    managed.at_rest, plain = True, managed.plain
    if managed.sharded:
        plain.grad = None
        plain.data = plain.new_empty(0)


def _form_of(form: Callable[[ManagedParam], Any]) -> Callable[[Any], Any]:
    """A function that returns one form of a managed parameter, and anything else as it is."""

    def of(param: Any) -> Any:
        managed = managed_by(param) if isinstance(param, torch.Tensor) else None
        return param if managed is None else form(managed)

    return of
