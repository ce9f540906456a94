"""Compiled steps: the first call traces the step and distributes the state, later calls find and run their program."""

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

from torch_testing_ext._torch.spmd import (
    disable_torch_function,
    global_module_hooks,
    kernel_choices,
    saved_tensor_hooks,
    tree,
)

from ..lower.direct import write_to_buckets
from ..lower.executable import make_executable
from ..lower.handshake import Handshake, make_handshake
from ..lower.lowering import LoweredProgram
from ..parallel_modes import ParallelMode
from ..param_layout import Layout
from ..spmd_errors import SPMDError
from ..trace.call_arguments import call_signature, flatten_arguments, signature_without_batch_sizes, validate_inputs
from ..trace.distribute import distribute, install_distributed
from ..trace.forms import trace_step
from ..trace.override import Override, overriding
from ..trace.tracing import TraceRequest
from ..trace.train_state import StepState, collect_state
from .agreement import Proposal, agree
from .binding import Binding
from .call_plan import CallPlan
from .eager import Predecessors
from .exchange import ExchangeSchedule
from .gloo_exit import let_gloo_finish
from .lockstep import lockstep_of
from .program_summary import StepReport, count_collectives
from .snapshot import StateSnapshot
from .verify import Verification, VerifyMode, too_large

_tree = tree()
_GLOBAL_HOOKS = global_module_hooks()


class _PlanCache:
    """The plans for one set of modules and optimizers, and the binding they share."""

    def __init__(self, leaves: list[Any]) -> None:
        self.owners = _owners(leaves)  # kept alive, because their ids are the key of this cache
        self.binding: Binding | None = None
        self.known: dict[Any, list[CallPlan]] = {}  # by everything that a program depends on
        self.quick: dict[Any, list[CallPlan]] = {}  # by the call's arguments, for the current binding
        self.predecessors = Predecessors()
        self.before_first: StateSnapshot | None = None  # until the first call has been verified

    def forget(self, plan: CallPlan) -> None:
        for plans in (*self.known.values(), *self.quick.values()):
            if plan in plans:
                plans.remove(plan)


def _owners(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, (nn.Module, Optimizer))]


class CompiledStep:
    """A train step as a data-parallel program. Every rank calls it like the step itself, with its own batch."""

    def __init__(
        self,
        step: Callable[..., Any],
        mode: ParallelMode,
        backend: str,
        overrides: list[Override],
        transformation: Callable[[fx.GraphModule], fx.GraphModule | None] | None,
        verify: VerifyMode,
    ) -> None:
        functools.update_wrapper(self, step)
        self.step, self.mode, self.backend = step, mode, backend
        self.overrides, self.transformation, self.verify = overrides, transformation, verify
        self._exchanges = ExchangeSchedule()
        self._met_unverified = False
        self._told_others = False
        self.mesh: DeviceMesh | None = None
        self.last: CallPlan | None = None
        self.traces = 0
        self._device_type = "cpu"
        self._caches: dict[Any, _PlanCache] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        shape: list[Any] = []
        flatten_arguments(args, leaves, shape)
        if kwargs:
            flatten_arguments(kwargs, leaves, shape)
        facts = self._global_facts()
        key = (call_signature(leaves, shape), facts)
        owner_ids = tuple([id(leaf) for leaf in _owners(leaves)])
        cache = self._caches.get(owner_ids)
        self._told_others = False
        plan = None
        if cache is not None and cache.binding is not None and cache.binding.is_current():
            plan = _first_fit(cache.quick.get(key, ()), cache.binding)
        if plan is None:
            plan = self._agreed_plan(args, kwargs, leaves, shape, key)
        self.last = plan
        if self._verifies(plan):
            return self._verified_call(plan, args, kwargs, leaves, facts, owner_ids)
        return self._run(plan, leaves, facts)

    def _run(self, plan: CallPlan, leaves: list[Any], facts: tuple[Any, ...]) -> Any:
        if facts[0] or facts[2]:
            with torch.autocast("cpu", enabled=False), torch.autocast(self._device_type, enabled=False):
                return plan(leaves)
        return plan(leaves)

    # -- verification

    def _verifies(self, plan: CallPlan) -> bool:
        """Whether to verify this call. Ranks decide that together, except for programs that do not communicate."""
        if self._is_unverified(plan) and (reason := _exemption(plan)):
            plan.verification, plan.is_exempt = f"not verified: {reason}", True
            for cache in self._caches.values():
                cache.before_first = None
        wanted = not plan.is_exempt and (self.verify == "always" or self._is_unverified(plan))
        if plan.handshake is None or self._told_others:  # nobody to ask, or all ranks have just agreed on the program
            return wanted
        if self.verify != "always" and not self._exchanges.is_due():
            self._met_unverified |= wanted
            return False
        return self._exchange(plan, wanted)

    def _verified_call(
        self, plan: CallPlan, args: Any, kwargs: Any, leaves: list[Any], facts: Any, owner_ids: tuple[int, ...]
    ) -> Any:
        cache = self._caches[owner_ids]
        before, cache.before_first = cache.before_first, None
        verification = Verification(plan, before, cache.predecessors)
        try:
            result = verification.run(
                lambda: self._run_eagerly(args, kwargs, plan.binding.state),
                lambda: self._run(plan, leaves, facts),
                leaves,
            )
        except BaseException:
            if before is not None:
                del self._caches[owner_ids]
            else:
                cache.forget(plan)  # the next call traces again
            raise
        plan.verification = f"verified in {verification.seconds:.2f} s"
        return result

    def _is_unverified(self, plan: CallPlan) -> bool:
        return plan.verification is None and self.verify != "off"

    def _exchange(self, plan: CallPlan, unverified: bool) -> bool:
        """Tell the other ranks whether this rank's program is new, and return whether any rank's is."""
        assert plan.handshake is not None
        mine = Proposal(stage="later", unverified=unverified, met_unverified=self._met_unverified)
        mine.facts, mine.exempt = plan.handshake.facts, plan.is_exempt
        plan.lockstep.interrupt()
        proposals = agree(mine, plan.lockstep.group)
        plan.lockstep.expect(plan.handshake)
        self._met_unverified = False
        self._exchanges.conclude(not any(p.unverified or p.met_unverified for p in proposals))
        return any(p.unverified for p in proposals) and not any(p.exempt for p in proposals)

    def _run_eagerly(self, args: Any, kwargs: Any, state: StepState) -> Any:
        if not self.overrides:
            return self.step(*args, **kwargs)
        with overriding(self.overrides)(state):
            return self.step(*args, **kwargs)

    # -- inspection

    @property
    def graph(self) -> fx.GraphModule:
        """The graph of the last call."""
        return self._last_plan().program.graph

    def print_readable(self) -> str:
        """Print the graph of the last call as code, and return it."""
        return self.graph.print_readable()

    def report(self) -> StepReport:
        """Summarize the program of the last call: its collectives, and the parameters in each bucket."""
        plan = self._last_plan()
        graph = plan.program.graph.graph
        operations = sum(node.op not in ("placeholder", "output") for node in graph.nodes)
        return StepReport(
            getattr(self, "__name__", "step"),
            "inductor" if plan.compiled else "fx",
            plan.mesh.size(),
            self.traces,
            operations,
            count_collectives(graph),
            plan.program.buckets,
            plan.verification or "not verified",
        )

    def _last_plan(self) -> CallPlan:
        if self.last is None:
            raise SPMDError(
                "The step has not been called yet.", remedy="Call it once: the first call creates the graph."
            )
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
            torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(),
            kernel_choices(),
            saved_tensor_hooks(),
            _looks_for_nan(),
            *map(len, _GLOBAL_HOOKS),
        )

    def _agreed_plan(self, args: Any, kwargs: Any, leaves: list[Any], shape: list[Any], key: Any) -> CallPlan:
        """Find or make a plan; if that fails, tell the other ranks, which would wait for this one."""
        try:
            return self._find_or_make_plan(args, kwargs, leaves, shape, key)
        except Exception as error:
            if not self._told_others and dist.is_initialized():
                group = self.mesh.get_group() if self.mesh is not None else dist.group.WORLD
                assert group is not None
                lockstep_of(group, self._device_type).fail(error)
            raise

    def _find_or_make_plan(self, args: Any, kwargs: Any, leaves: list[Any], shape: list[Any], key: Any) -> CallPlan:
        validate_inputs(leaves, self.mode.batch_dim)
        if _looks_for_nan():
            raise SPMDError(
                "Anomaly detection is on (torch.autograd.set_detect_anomaly), but a program does not look for NaN.",
                remedy="Turn it off, or look for NaN in what the step returns.",
            )
        if not dist.is_initialized():
            raise SPMDError("There is no process group.", remedy="Call torch.distributed.init_process_group first.")
        state = collect_state(leaves)
        self._device_type = state.device.type
        let_gloo_finish()
        owner_ids = tuple([id(leaf) for leaf in _owners(leaves)])
        cache = self._caches.get(owner_ids) or _PlanCache(leaves)
        layouts = self.mode.layouts(state, dist.get_rank(), dist.get_world_size())
        request = self._request(args, kwargs, leaves, state, layouts)
        batch_free_key = (signature_without_batch_sizes(leaves, shape, self.mode.batch_dim), key[1])
        if any(not isinstance(ref.value, DTensor) for ref in state.params):
            if cache.binding is None:
                plan = self._make_first_plan(request, cache)
            else:  # plain parameters have replaced distributed ones, as with load_state_dict(assign=True)
                install_distributed(state, layouts, self._mesh(state))
                plan = self._find_plan(cache, Binding(state, layouts), batch_free_key, leaves) or self._make_plan(
                    request
                )
        else:
            plan = self._find_plan(cache, Binding(state, layouts), batch_free_key, leaves) or self._make_plan(request)
        self._caches[owner_ids] = cache
        if cache.binding is not plan.binding:
            cache.binding, cache.quick = plan.binding, {}
        plans = cache.known.setdefault((plan.binding.key(), batch_free_key), [])
        if plan not in plans:
            plans.append(plan)
        quick = cache.quick.setdefault(key, [])
        if plan not in quick:
            quick.append(plan)
        return plan

    def _find_plan(
        self, cache: _PlanCache, binding: Binding, batch_free_key: Any, leaves: list[Any]
    ) -> CallPlan | None:
        if cache.binding is not None and cache.binding.is_current():
            binding = cache.binding
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for plan in cache.known.get((binding.key(), batch_free_key), ()):
            reads = plan.program.traced.reads
            reads.labels.state = binding.state
            if plan.fits(binding) and plan.program.traced.sizes.hold(tensors) and reads.hold():
                plan.bind(binding)
                return plan
        return None

    def _request(
        self, args: Any, kwargs: Any, leaves: list[Any], state: StepState, layouts: list[Layout]
    ) -> TraceRequest:
        grads = frozenset(i for i, ref in enumerate(state.params) if ref.value.requires_grad or _has_grad(ref.value))
        return TraceRequest(
            self.step,
            leaves,
            args,
            kwargs,
            state,
            state.optimizer_states(),
            layouts,
            self.mode.batch_dim,
            grads,
            overrides=overriding(self.overrides) if self.overrides else None,
        )

    def _make_plan(self, request: TraceRequest) -> CallPlan:
        """Make a plan for a distributed model, without communication: ranks may trace at different times."""
        program, compiled = self._make_program(request)
        run = make_executable(program, compiled)
        return CallPlan(program, run, compiled, self._mesh(request.state), Binding(request.state, request.layouts))

    def _make_first_plan(self, request: TraceRequest, cache: _PlanCache) -> CallPlan:
        """Trace, agree with the other ranks, then distribute, so that an error leaves all ranks unchanged."""
        state = request.state
        mesh = self._mesh(state)
        proposal = Proposal(facts=_facts_of(state, request.layouts))
        error: Exception | None = None
        try:
            program, compiled = self._make_program(request)
            run = make_executable(program, compiled)
            proposal.facts["custom passes"] = ["that change the graph"] if program.changed_by_user else []
            proposal.facts.update((program.handshake or Handshake(())).facts)
            proposal.facts["values of captured tensors"] = program.updates.captured
            proposal.present_grads = [ref.value.grad is not None for ref in state.params]
            if _depends_on_grads(program):
                proposal.facts["gradients on entry"] = list(map(str, proposal.present_grads))
        except Exception as caught:
            error = caught
            proposal.error = f"{type(caught).__name__}: {caught}"
        self._told_others = True
        lockstep_of(mesh.get_group(), mesh.device_type).interrupt()
        proposals = agree(proposal, mesh.get_group())
        if error is not None:
            raise error
        grads = [any(flags) for flags in zip(*(p.present_grads for p in proposals), strict=True)]
        before = [ref.value for ref in state.params]
        if self.verify != "off" and not too_large(state):
            cache.before_first = StateSnapshot(state)
        distribute(state, request.layouts, mesh, grads)
        for old, ref in zip(before, state.params, strict=True):
            cache.predecessors.add(old, ref.value)
        self._exchanges = ExchangeSchedule()
        plan = CallPlan(program, run, compiled, mesh, Binding(state, request.layouts))
        if plan.handshake is not None:
            plan.lockstep.expect(plan.handshake)
        return plan

    def _make_program(self, request: TraceRequest) -> tuple[LoweredProgram, bool]:
        """Trace and lower. If the step depends on gradients on entry, trace again with only those that exist."""
        program, compiled = self._trace_and_lower(request)
        present = frozenset(i for i in request.present_grads if _has_grad(request.state.params[i].value))
        if _depends_on_grads(program) and present != request.present_grads:
            request.present_grads = present
            program, compiled = self._trace_and_lower(request)
        return program, compiled

    def _trace_and_lower(self, request: TraceRequest, fixed_sizes: bool = False) -> tuple[LoweredProgram, bool]:
        request.compiling = compiled = self.backend == "inductor"
        traced = trace_step(request, fixed_sizes)
        if compiled and traced.effects.states:
            # A step that creates optimizer states runs only once: not worth a compilation.
            request.compiling = compiled = False
            traced = trace_step(request, fixed_sizes)
        self.traces += 1
        mesh = self._mesh(request.state)
        group = mesh.get_group().group_name
        program = self.mode.partition(traced, request.state, request.entries, group, mesh.size(), compiled)
        if program.updates.by_size and mesh.size() > 1 and not fixed_sizes:
            return self._trace_and_lower(request, fixed_sizes=True)  # a size that differs makes the ranks diverge
        plain = str(program.graph.graph)
        program.graph = self._transform(program.graph, request.state)
        # Whoever replaces modules or operations means to change the results.
        program.changed_by_user = bool(self.overrides) or str(program.graph.graph) != plain
        if mesh.size() > 1:
            program.handshake = make_handshake(program.graph, program.buckets, program.updates, compiled)
            if not compiled:
                write_to_buckets(program.graph)
        return program, compiled

    def _transform(self, module: fx.GraphModule, state: StepState) -> fx.GraphModule:
        module = self.mode.transform(module)
        for override in self.overrides:
            module = override.transform(module, [ref.value for ref in state.params])
        changed = self.transformation(module) if self.transformation is not None else None
        module = module if changed is None else changed
        module.graph.lint()
        module.recompile()
        return module

    def _mesh(self, state: StepState) -> DeviceMesh:
        if self.mesh is None:
            meshes = [p.value.device_mesh for p in state.params if isinstance(p.value, DTensor)]
            self.mesh = meshes[0] if meshes else init_device_mesh(state.device.type, (dist.get_world_size(),))
        return self.mesh


def _looks_for_nan() -> bool:
    """Whether anomaly detection raises when a backward makes NaN."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _exemption(plan: CallPlan) -> str | None:
    """Why a program is not to be verified, if so. All ranks come to the same answer."""
    if plan.program.changed_by_user:
        return "changed by an override or a custom pass"
    if plan.handshake is None and plan.mesh.size() > 1 and any(layout.sharded for layout in plan.binding.layouts):
        return "it does not communicate, but to verify it would"
    return too_large(plan.binding.state)


def _first_fit(plans: Iterable[CallPlan], binding: Binding) -> CallPlan | None:
    for plan in plans:
        if (plan.always_fits or plan.fits(binding)) and plan.program.traced.reads.hold():
            return plan
    return None


def _has_grad(param: torch.Tensor) -> bool:
    with disable_torch_function():
        return param.grad is not None


def _depends_on_grads(program: LoweredProgram) -> bool:
    """Whether the step reads gradients that exist before it, or looks whether they do."""
    used = zip(program.traced.sources, program.used, strict=True)
    return bool(program.traced.seen_grads) or any(s.kind == "grad" and u for s, u in used)


def _facts_of(state: StepState, layouts: list[Layout]) -> dict[str, list[str]]:
    """Describe everything in which the ranks' models and optimizers must agree."""
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
