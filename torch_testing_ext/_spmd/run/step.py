"""The compiled step: the first call traces and distributes, every other one finds its program and runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch import tree

from ..errors import SPMDError
from ..layout import Layout
from ..lower.cleaning import placeholders
from ..lower.executable import executable
from ..lower.lowering import LoweredProgram
from ..parallel_mode import ParallelMode
from ..trace.arguments import flatten, loose_signature, signature, validate
from ..trace.distribute import distribute, install_distributed
from ..trace.override import Override, overriding
from ..trace.state import StepState, collect
from ..trace.tracing import Request, trace
from .agreement import Proposal, agree
from .binding import Binding
from .gloo_exit import let_gloo_finish
from .plan import CallPlan
from .report import Report, count_collectives

_tree = tree()


class _Job:
    """The programs for one set of modules and optimizers, and the state they are bound to."""

    def __init__(self, leaves: list[Any]) -> None:
        self.owners = _owners(leaves)  # kept alive: their ids are how a call finds its job
        self.binding: Binding | None = None
        self.known: dict[Any, list[CallPlan]] = {}  # by everything that is written into a program
        self.quick: dict[Any, list[CallPlan]] = {}  # by the call's arguments, for the present binding


def _owners(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, (nn.Module, Optimizer))]


class CompiledStep:
    """A train step as a data-parallel program. Call it as the step itself, on every rank, with the rank's own batch."""

    def __init__(
        self,
        step: Callable[..., Any],
        mode: ParallelMode,
        backend: str,
        overrides: list[Override],
        transformation: Callable[[fx.GraphModule], fx.GraphModule | None] | None,
    ) -> None:
        functools.update_wrapper(self, step)
        self.step, self.mode, self.backend = step, mode, backend
        self.overrides, self.transformation = overrides, transformation
        self.mesh: DeviceMesh | None = None
        self.last: CallPlan | None = None
        self.traces = 0
        self._device_type = "cpu"
        self._jobs: dict[Any, _Job] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        shape: list[Any] = []
        flatten(args, leaves, shape)
        if kwargs:
            flatten(kwargs, leaves, shape)
        facts = self._global_facts()
        key = (signature(leaves, shape), facts)
        job = self._jobs.get(tuple([id(leaf) for leaf in _owners(leaves)]))
        plan = None
        if job is not None and job.binding is not None and job.binding.is_current():
            plan = _first_fitting(job.quick.get(key, ()), job.binding)
        if plan is None:
            plan = self._find_or_make(args, kwargs, leaves, shape, key)
        self.last = plan
        if facts[0] or facts[2]:
            with torch.autocast("cpu", enabled=False), torch.autocast(self._device_type, enabled=False):
                return plan(leaves)
        return plan(leaves)

    # -- for a person to look at

    @property
    def graph(self) -> fx.GraphModule:
        """The graph of the last call."""
        return self._last().program.graph

    def print_readable(self) -> str:
        """Print the graph of the last call as code, and return it."""
        return self.graph.print_readable()

    def report(self) -> Report:
        """What the last call's program does: its collectives, and what travels in each."""
        plan = self._last()
        graph = plan.program.graph.graph
        operations = sum(node.op not in ("placeholder", "output") for node in graph.nodes)
        return Report(
            getattr(self, "__name__", "step"),
            "inductor" if plan.compiled else "fx",
            plan.mesh.size(),
            self.traces,
            operations,
            count_collectives(graph),
            plan.program.buckets,
        )

    def _last(self) -> CallPlan:
        if self.last is None:
            raise SPMDError("The step has not been called yet.", remedy="Call it once; the first call makes the graph.")
        return self.last

    # -- finding or making a program

    def _global_facts(self) -> tuple[Any, ...]:
        device = self._device_type
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
        )

    def _find_or_make(self, args: Any, kwargs: Any, leaves: list[Any], shape: list[Any], key: Any) -> CallPlan:
        validate(leaves, self.mode.batch_dim)
        if not dist.is_initialized():
            raise SPMDError("There is no process group.", remedy="Call torch.distributed.init_process_group first.")
        state = collect(leaves)
        self._device_type = state.device.type
        let_gloo_finish()
        ours = tuple([id(leaf) for leaf in _owners(leaves)])
        job = self._jobs.get(ours) or _Job(leaves)
        layouts = self.mode.layouts(state, dist.get_rank(), dist.get_world_size())
        request = self._request(args, kwargs, leaves, state, layouts)
        loose = (loose_signature(leaves, shape, self.mode.batch_dim), key[1])
        if any(not isinstance(held.value, DTensor) for held in state.params):
            if job.binding is None:
                plan = self._first(request)
            else:  # plain parameters took the places of distributed ones, as load_state_dict(assign=True) puts them
                install_distributed(state, layouts, self._mesh(state))
                plan = self._known(job, Binding(state, layouts), loose, leaves) or self._make(request)
        else:
            plan = self._known(job, Binding(state, layouts), loose, leaves) or self._make(request)
        self._jobs[ours] = job
        if job.binding is not plan.binding:
            job.binding, job.quick = plan.binding, {}
        plans = job.known.setdefault((plan.binding.key(), loose), [])
        if plan not in plans:
            plans.append(plan)
        job.quick.setdefault(key, []).append(plan)
        return plan

    def _known(self, job: _Job, binding: Binding, loose: Any, leaves: list[Any]) -> CallPlan | None:
        if job.binding is not None and job.binding.is_current():
            binding = job.binding
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for plan in job.known.get((binding.key(), loose), ()):
            if plan.fits(binding) and plan.program.traced.guards(tensors):
                plan.bind(binding)
                return plan
        return None

    def _request(self, args: Any, kwargs: Any, leaves: list[Any], state: StepState, layouts: list[Layout]) -> Request:
        _, spec = _tree.tree_flatten((args, kwargs))
        trainable = frozenset(i for i, held in enumerate(state.params) if held.value.requires_grad)
        return Request(
            self.step,
            leaves,
            spec,
            state,
            state.optimizer_states(),
            layouts,
            self.mode.batch_dim,
            trainable,
            overrides=overriding(self.overrides) if self.overrides else None,
        )

    def _make(self, request: Request) -> CallPlan:
        """A plan for a model that is distributed already. Ranks may come here at different times: no communication."""
        program, compiled = self._program(request)
        run = executable(program, compiled)
        return CallPlan(program, run, compiled, self._mesh(request.state), Binding(request.state, request.layouts))

    def _first(self, request: Request) -> CallPlan:
        """Trace, agree with the other ranks, then distribute: an error on the way has changed nothing on any rank."""
        state = request.state
        mesh = self._mesh(state)
        proposal = Proposal(facts=_facts_of(state, request.layouts))
        error: Exception | None = None
        try:
            program, compiled = self._program(request)
            run = executable(program, compiled)
            proposal.facts["collectives"] = [f"{b.collective} of {b.dtype}, {b.names}" for b in program.buckets]
            proposal.present_grads = [held.value.grad is not None for held in state.params]
            if any(s.kind == "grad" and used for s, used in zip(program.traced.sources, program.used, strict=True)):
                proposal.facts["gradients on entry"] = list(map(str, proposal.present_grads))
        except Exception as caught:
            error = caught
            proposal.error = f"{type(caught).__name__}: {caught}"
        everyone = agree(proposal, mesh.get_group())
        if error is not None:
            raise error
        grads = [any(flags) for flags in zip(*(p.present_grads for p in everyone), strict=True)]
        distribute(state, request.layouts, mesh, grads)
        return CallPlan(program, run, compiled, mesh, Binding(state, request.layouts))

    def _program(self, request: Request) -> tuple[LoweredProgram, bool]:
        """Trace and lower, with gradients on entry only where they exist if the step reads any."""
        program, compiled = self._traced(request)
        present = frozenset(i for i in request.present_grads if request.state.params[i].value.grad is not None)
        reads_grads = any(s.kind == "grad" and u for s, u in zip(program.traced.sources, program.used, strict=True))
        if reads_grads and present != request.present_grads:
            request.present_grads = present
            program, compiled = self._traced(request)
        return program, compiled

    def _traced(self, request: Request) -> tuple[LoweredProgram, bool]:
        request.compiling = compiled = self.backend == "inductor"
        traced = trace(request)
        if compiled and traced.effects.states:
            # A step that makes optimizer states runs once in this form: not worth a compilation.
            request.compiling = compiled = False
            traced = trace(request)
        self.traces += 1
        mesh = self._mesh(request.state)
        group = mesh.get_group().group_name
        program = self.mode.partition(traced, request.state, request.entries, group, mesh.size(), compiled)
        program.graph = self._transform(program.graph, request.state)
        program.used = [bool(node.users) for node in placeholders(program.graph.graph)]
        return program, compiled

    def _transform(self, module: fx.GraphModule, state: StepState) -> fx.GraphModule:
        module = self.mode.transform(module)
        for override in self.overrides:
            module = override.transform(module, [held.value for held in state.params])
        changed = self.transformation(module) if self.transformation is not None else None
        module = module if changed is None else changed
        module.graph.lint()
        module.recompile()
        return module

    def _mesh(self, state: StepState) -> DeviceMesh:
        if self.mesh is None:
            known = [p.value.device_mesh for p in state.params if isinstance(p.value, DTensor)]
            self.mesh = known[0] if known else init_device_mesh(state.device.type, (dist.get_world_size(),))
        return self.mesh


def _first_fitting(plans: Iterable[CallPlan], binding: Binding) -> CallPlan | None:
    for plan in plans:
        if plan.always_fits or plan.fits(binding):
            return plan
    return None


def _facts_of(state: StepState, layouts: list[Layout]) -> dict[str, list[str]]:
    """What the ranks' models and optimizers must have in common, in words."""
    return {
        "parameters": [
            f"{param.name}, {_kind(param.value)}, {_trainable(param.value)}, {layout.placement}"
            for param, layout in zip(state.params, layouts, strict=True)
        ],
        "buffers": [f"{buffer.name}, {_kind(buffer.value)}" for buffer in state.buffers],
        "optimizer states": [
            f"{state.params[entry.owner].name if entry.owner is not None else entry.key}{name}, {_kind(leaf)}"
            for entry in state.optimizer_states()
            for name, leaf in zip(entry.names, entry.leaves, strict=True)
        ],
    }


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _trainable(param: torch.Tensor) -> str:
    return "trainable" if param.requires_grad else "frozen"
