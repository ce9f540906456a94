"""Call plans: a program with the places that its inputs are read from and its outputs are written to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import (
    below_autograd,
    disable_torch_function,
    local_tensor,
    set_grad_enabled,
    set_local_tensor,
    tree,
)

from ..lower.handshake import ProgramChanged
from ..lower.lowering import LoweredProgram
from ..trace.distribute import is_step_count, to_dtensor
from ..trace.results import rebuilt
from ..trace.tracing import InputSource, NewState, Recipe
from .binding import Binding
from .lockstep import lockstep_of

_tree = tree()


class CallPlan:
    """One program, ready to be called with the leaves of a step's arguments."""

    def __init__(
        self,
        program: LoweredProgram,
        run: Callable[[list[Any]], Any],
        compiled: bool,
        mesh: DeviceMesh,
        binding: Binding,
    ) -> None:
        self.program, self.run, self.compiled, self.mesh = program, run, compiled, mesh
        self.lockstep = lockstep_of(mesh.get_group(), mesh.device_type)
        self.handshake = self.lockstep.identify(program.handshake)
        self.looks_first = self.handshake is not None and not self.handshake.collectives
        self.effects = program.traced.effects
        self.verification: str | None = None  # how it went, or why it did not take place; None before it
        self.is_exempt = False  # from verification
        self.sources = [s for s, used in zip(program.traced.sources, program.used, strict=True) if used]
        self.constant_lrs = {
            group: binding.state.optimizers[group[0]].param_groups[group[1]]["lr"] for group in program.constant_lrs
        }
        traced_grads = {s.i for s in program.traced.sources if s.kind == "grad"}
        # Tracing assumes gradients on entry. Those that the step neither reads nor looks at may be absent.
        self.needs_grads = {s.i for s in self.sources if s.kind == "grad"} | program.traced.seen_grads
        self.needs_no_grads = set(range(len(binding.params))) - traced_grads
        self.always_fits = not (self.needs_grads or self.needs_no_grads or self.constant_lrs)
        self.grad_dtensors: dict[int, DTensor] = {}
        # The reference counts of an unshared gradient DTensor: while it is not, and while it is, the `.grad`.
        self.grad_refcounts: dict[int, tuple[int, int]] = {}
        self.bind(binding)

    def bind(self, binding: Binding) -> None:
        """Look up everything that stays the same from call to call."""
        self.binding = binding
        self.template: list[Any] = [None] * len(self.sources)
        self.from_args: list[tuple[int, int]] = []
        self.from_groups: list[tuple[int, dict[str, Any]]] = []
        self.from_grads: list[tuple[int, torch.Tensor]] = []
        for position, source in enumerate(self.sources):
            if source.kind == "arg":
                self.from_args.append((position, source.i))
            elif source.kind == "lr":
                group = binding.state.optimizers[source.i].param_groups[source.j]
                self.from_groups.append((position, group))
            elif source.kind == "grad":
                self.from_grads.append((position, binding.params[source.i]))
            else:
                self.template[position] = binding.value_of(source)
        self.new_grads = [(i, binding.params[i], index) for i, index in self.effects.grads.items()]

    def fits(self, binding: Binding) -> bool:
        """Whether the gradients on entry and the constant learning rates are those that this program requires."""
        params, optimizers = binding.params, binding.state.optimizers
        return (
            all(params[i].grad is not None for i in self.needs_grads)
            and all(params[i].grad is None for i in self.needs_no_grads)
            and all(optimizers[i].param_groups[j]["lr"] == lr for (i, j), lr in self.constant_lrs.items())
        )

    # -- a call

    def __call__(self, leaves: list[Any]) -> Any:
        inputs = self.template.copy()
        for position, leaf in self.from_args:
            inputs[position] = leaves[leaf]
        for position, group in self.from_groups:
            inputs[position] = group["lr"]
        for position, param in self.from_grads:
            inputs[position] = local_tensor(param.grad)
        grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)
        guard = below_autograd()
        try:
            if self.handshake is not None:
                self._start()
            outputs = self.run(inputs)
        except ProgramChanged:
            assert self.handshake is not None
            self.lockstep.stop(self.handshake)
        finally:
            del guard
            set_grad_enabled(grad_mode)
        if self.handshake is not None:
            self.lockstep.advance(self.handshake)
        if self.new_grads:
            with disable_torch_function():
                self._install_grads(outputs)
        if self.effects.states or self.effects.buffers:
            self._install_states(outputs)
        return self._result(outputs, leaves)

    def _start(self) -> None:
        """Make sure that all ranks are about to run this program."""
        assert self.handshake is not None
        if self.handshake is not self.lockstep.expected:
            self.lockstep.change(self.handshake)
        if self.looks_first:
            self.lockstep.look()

    def _install_grads(self, outputs: Sequence[Any]) -> None:
        for i, param, index in self.new_grads:
            if index is None:
                param.grad = None
                continue
            dtensor = self.grad_dtensors.get(i)
            attached = dtensor is not None and param.grad is dtensor
            if dtensor is not None and sys.getrefcount(dtensor) == self.grad_refcounts[i][attached]:
                # User code holds no reference to the last step's gradient: reuse its DTensor.
                set_local_tensor(dtensor, outputs[index])
                if not attached:
                    param.grad = dtensor
            else:
                self._install_new_grad(i, param, outputs[index])

    def _install_new_grad(self, i: int, param: Any, local: torch.Tensor) -> None:
        layout, dtensors = self.binding.layouts[i], self.grad_dtensors
        dtensors[i] = to_dtensor(local, layout.shape, layout, self.mesh)
        detached = _refcount(dtensors, i)
        param.grad = dtensors[i]
        self.grad_refcounts[i] = detached, _refcount(dtensors, i)

    def _install_states(self, outputs: Sequence[Any]) -> None:
        state = self.binding.state
        for new in self.effects.states:
            leaves = [self._new_leaf(new, j, recipe, outputs) for j, recipe in enumerate(new.leaves)]
            key = new.key if new.owner is None else self.binding.params[new.owner]
            state.optimizers[new.optimizer].state[key] = _tree.tree_unflatten(leaves, new.spec)
        for i, index in self.effects.buffers.items():
            self._install_buffer(i, outputs[index])

    def _new_leaf(self, new: NewState, j: int, recipe: Recipe, outputs: Sequence[Any]) -> Any:
        if recipe.output is None:
            return recipe.constant if recipe.source is None else self._object(recipe.source, [])
        value = outputs[recipe.output]
        if new.owner is not None and isinstance(value, torch.Tensor) and not is_step_count(new.names[j]):
            layout = self.binding.layouts[new.owner]
            if value.shape == layout.local_shape and (not layout.sharded or recipe.output in self.program.shards):
                return to_dtensor(value, layout.shape, layout, self.mesh)
        return value

    def _install_buffer(self, i: int, value: torch.Tensor) -> None:
        ref = self.binding.state.buffers[i]
        if ref.value.shape == value.shape and ref.value.dtype == value.dtype:
            ref.value.copy_(value)
            return
        for slot in ref.slots:
            slot.module._buffers[slot.name] = value

    def _result(self, outputs: Sequence[Any], leaves: list[Any]) -> Any:
        values = [self._returned(recipe, outputs, leaves) for recipe in self.effects.result]
        return rebuilt(self.effects.result_structure, values)

    def _returned(self, recipe: Recipe, outputs: Sequence[Any], leaves: list[Any]) -> Any:
        if recipe.output is not None:
            value = outputs[recipe.output]
            layout = self.program.shards.get(recipe.output)
            if layout is None:
                return value
            return to_dtensor(value, layout.shape, layout, self.mesh)
        return recipe.constant if recipe.source is None else self._object(recipe.source, leaves)

    def _object(self, source: InputSource, leaves: list[Any]) -> Any:
        """The object that a graph input is read from."""
        binding = self.binding
        if source.kind == "arg":
            return leaves[source.i]
        if source.kind == "param":
            return binding.params[source.i]
        if source.kind == "grad":
            return binding.params[source.i].grad
        if source.kind == "lr":
            return binding.state.optimizers[source.i].param_groups[source.j]["lr"]
        if source.kind == "buffer":
            return binding.state.buffers[source.i].value
        return binding.entries[source.i].leaves[source.j]


def _refcount(dtensors: dict[int, DTensor], i: int) -> int:
    """The reference count of a gradient DTensor, taken with the same local references as in `_install_grads`."""
    dtensor = dtensors[i]
    return sys.getrefcount(dtensor)
