"""Makes rosters: admits what a call has found, lets the ranks agree, and gives all of them rank 0's values."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..parallel_modes import DataParallel
from ..param_layout import Layout
from ..spmd_errors import SPMDError
from .admission import admit_inference, admit_modules, admit_sharing, admit_tensor
from .first_agreement import compare_facts, facts_of, state_tensors
from .gradient_buckets import BucketStore
from .managed_params import ManagedParam, manage, managed_by
from .meeting_point import MeetingPoint
from .resting_state import adopt, distribute
from .roster import ParamSlot, Roster, slot_names
from .state_finder import FoundState
from .wire import Wire


@dataclass
class RosterPlan:
    """The contents of a roster to be, before anything is changed."""

    mode: DataParallel
    names: list[str]
    tensors: list[torch.Tensor]
    layouts: list[Layout]
    in_modules: set[int]  # the identities of the tensors that a module holds
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
        if not in_module:  # nothing can hold its rows between calls
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
            return adopt(tensor, layout, name), tensor
        if layout.sharded or (plan.mode.between == "dtensor" and id(tensor) in plan.in_modules):
            return distribute(tensor, layout, name, self._mesh(plan, tensor))
        if known is not None:
            known.layout, known.kind = layout, (tensor.shape, tensor.dtype)
            return known, tensor
        return manage(tensor, layout, name), tensor

    def _mesh(self, plan: RosterPlan, tensor: Any) -> DeviceMesh:
        if self.mesh is None:
            meshes = [param.device_mesh for param in plan.tensors if isinstance(param, DTensor)]
            self.mesh = meshes[0] if meshes else init_device_mesh(tensor.device.type, (dist.get_world_size(),))
        return self.mesh
