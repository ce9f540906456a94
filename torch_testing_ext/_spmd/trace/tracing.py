"""Tracing a train step into one graph of the local program, with markers where it needs the other ranks.

The step runs once on fake tensors in place of parameters, gradients, buffers, optimizer states and inputs. Its effects
(new gradients, new states, return value) are recorded as `StepEffects`. Then model and optimizers are restored.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import (
    compiled_functions_run_eagerly,
    disable_torch_function,
    fake_like,
    fake_of_captured,
    foreach_by_default,
    import_tracer,
    is_fake,
    local_tensor,
    new_fake_mode,
    python_dispatcher,
    seen_as_compiling,
    storage_key,
    tree,
)

from ..param_layout import Layout
from ..spmd_errors import SPMDError, raised_by_user, recording_errors
from .call_arguments import first_of_same, is_plain, rebuild_arguments
from .distribute import layout_owner, put_parameter
from .guards import Labels, ReadGuards, guard_reads
from .lasting_changes import (
    refuse_changed_arguments,
    refuse_changed_forms,
    refuse_changed_groups,
    refuse_changed_requirement,
    refuse_new_buffers,
    refuse_python_counter,
    refuse_rebound_parameters,
    refuse_shared_inputs,
    structure,
    write_counts,
)
from .markers import sync_gradients_of
from .observer import Observer
from .refusals import UserCodeMode, refusing_object_collectives, refusing_values_as_text
from .results import leaves_of, refuse_opaque
from .sizes import SizeGuards, sizes_as_numbers
from .substitution import Substitution, only_optimizers
from .swapping import recurrent_without_mkldnn, restoring
from .tensor_attributes import TensorAttributes
from .trace_modes import TraceWatch
from .train_state import StateEntry, StepState

import_tracer()
_tree = tree()


@dataclass(frozen=True)
class InputSource:
    """The place that a graph input is read from at each call.

    kind: "param", "grad", "buffer" (index i), "state" (entry i, leaf j), "lr" (optimizer i, group j), "arg" (leaf i).
    """

    kind: str
    i: int
    j: int = 0


@dataclass(frozen=True)
class Recipe:
    """The source of one value after a run: graph output number `output`, the object of `source`, or `constant`."""

    output: int | None = None
    source: InputSource | None = None
    constant: Any = None


@dataclass
class NewState:
    """The new value under one key of an optimizer's state."""

    optimizer: int
    owner: int | None
    key: Any
    spec: Any
    leaves: list[Recipe]
    names: list[str]


@dataclass
class StepEffects:
    """The results of a step, and the gradients, optimizer states and buffers that it changes."""

    result: list[Recipe] = field(default_factory=list)
    result_structure: Any = None  # the result without its leaves
    grads: dict[int, int | None] = field(default_factory=dict)  # param -> graph output, or None for no gradient
    states: list[NewState] = field(default_factory=list)
    buffers: dict[int, int] = field(default_factory=dict)  # buffer -> graph output


@dataclass
class TracedStep:
    """The graph of the local program, with the sources of its inputs and the effects of its outputs."""

    graph: fx.GraphModule
    sources: list[InputSource]  # one for each placeholder, in order
    effects: StepEffects
    sizes: SizeGuards
    layouts: list[Layout]
    is_number_lr: dict[tuple[int, int], bool]  # for each lifted learning rate, whether it is a Python number
    reads: ReadGuards
    seen_grads: set[int]  # the parameters of which the step looked whether there is a gradient on entry


@dataclass
class TraceRequest:
    """The task of one trace: the step, its flattened arguments, its state, and the layouts of its parameters."""

    step: Callable[..., Any]
    leaves: list[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: StepState
    entries: list[StateEntry]
    layouts: list[Layout]
    batch_dim: int
    present_grads: frozenset[int]
    constant_lrs: bool = False
    fixed_sizes: bool = False  # all sizes are numbers, for a step that cannot take symbols
    compiling: bool = False  # trace for inductor: optimizers use their capturable form if they have one
    raised_after_changes: bool = False  # whether the step raised an exception after it had changed something
    overrides: Callable[[StepState], contextlib.AbstractContextManager[None]] | None = None


class NeedsNumbers(Exception):
    """The step may tell a symbol for a size from a number."""


class Trace:
    """One trace of a step, in one form."""

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.state = request.state
        self.mode = new_fake_mode()
        owned = _storages_of([ref.value for ref in (*self.state.params, *self.state.buffers)])
        owned |= _storages_of(self._grads_and_states())
        inputs = _storages_of(request.leaves)
        refuse_shared_inputs(request.leaves, owned)
        self.watch = TraceWatch(owned, inputs)
        self.sources: list[InputSource] = []
        self.fakes: list[torch.Tensor] = []
        self.fake_of: dict[InputSource, torch.Tensor] = {}
        self.effects = StepEffects()
        self.groups: list[list[dict[str, Any]]] = []  # before the step runs
        self.is_number_lr: dict[tuple[int, int], bool] = {}

    def _add(self, source: InputSource, fake: torch.Tensor) -> None:
        self.sources.append(source)
        self.fakes.append(fake)
        self.fake_of[source] = fake

    def _make_fakes(self) -> None:
        request = self.request
        with self.mode:
            for i, (ref, layout) in enumerate(zip(self.state.params, request.layouts, strict=True)):
                self._add(InputSource("param", i), nn.Parameter(_empty(ref.value, layout), ref.value.requires_grad))
            for i in sorted(request.present_grads):
                self._add(InputSource("grad", i), _empty(self.state.params[i].value, request.layouts[i]))
            for e, entry in enumerate(request.entries):
                for j, leaf in enumerate(entry.leaves):
                    if isinstance(leaf, torch.Tensor):
                        owner = layout_owner(entry, j, self.state)
                        state_layout = None if owner is None else request.layouts[owner]
                        self._add(InputSource("state", e, j), _empty(leaf, state_layout))
            for i, ref in enumerate(self.state.buffers):
                self._add(InputSource("buffer", i), _empty(ref.value, None))
            for i, optimizer in enumerate(self.state.optimizers):
                for j, group in enumerate(optimizer.param_groups):
                    if self._lifts(group):
                        lr = group["lr"]
                        fake = (
                            _empty(lr, None) if isinstance(lr, torch.Tensor) else torch.empty((), dtype=torch.float64)
                        )
                        self._add(InputSource("lr", i, j), fake)
                        self.is_number_lr[(i, j)] = not isinstance(lr, torch.Tensor)
        dynamic = None if request.fixed_sizes else request.batch_dim
        first = first_of_same(request.leaves)
        for i, leaf in enumerate(request.leaves):
            if isinstance(leaf, torch.Tensor) and first[i] == i:
                self._add(InputSource("arg", i), fake_like(self.mode, leaf, f"t{i}", dynamic))

    def _lifts(self, group: dict[str, Any]) -> bool:
        lr = group.get("lr")
        return isinstance(lr, torch.Tensor) or (isinstance(lr, float) and not self.request.constant_lrs)

    # -- the run

    def run(self) -> TracedStep:
        self._make_fakes()
        observer = self._observer()
        rng = torch.get_rng_state()
        try:
            with restoring(self.state), self.mode, python_dispatcher():
                try:
                    graph = make_fx(functools.partial(self._run_step, observer), tracing_mode="real")(*self.fakes)
                finally:
                    observer.restore()
            _know_memory_of_captured(graph, self.mode)
        finally:
            rng_moved = not torch.equal(rng, torch.get_rng_state())
            torch.set_rng_state(rng)
        if rng_moved:
            raise SPMDError(
                "The step seeds the random generator or draws from it outside of torch operations (manual_seed?). The "
                "traced program would not repeat this.",
                remedy="Seed outside of the step.",
            )
        args = [fake for source, fake in zip(self.sources, self.fakes, strict=True) if source.kind == "arg"]
        sizes = SizeGuards(self.mode.shape_env, args)
        if "type" in observer.named_globals and not self.request.fixed_sizes:
            raise NeedsNumbers  # type(x.shape[0]) would be the type of a symbol
        reads = guard_reads(observer, self._roots(), self.state, self.watch.captured, self.substitution.read_values)
        return TracedStep(
            graph,
            self.sources,
            self.effects,
            sizes,
            self.request.layouts,
            self.is_number_lr,
            reads,
            self.substitution.seen_grads,
        )

    def _observer(self) -> Observer:
        to_fake = self._fakes_of_real()
        real_of = {id(fake): real for real, fake in self._real_and_fake()}
        labels = Labels(self.state)

        def label_of(tensor: torch.Tensor) -> Any:
            return "known" if id(tensor) in to_fake or is_fake(tensor) else labels(tensor)

        return Observer(label_of, self._bound(), to_fake, real_of)

    def _bound(self) -> dict[int, Any]:
        return {id(each): each for each in (*self.state.modules, *self.state.optimizers)}

    def _roots(self) -> dict[str, Any]:
        """The Python objects that the step gets from outside, by the names that errors give them."""
        roots: dict[str, Any] = {"step": self.request.step}
        for module, name in zip(self.state.modules, self.state.module_names, strict=True):
            roots[name or type(module).__name__] = module
        roots.update((f"{type(o).__name__} (optimizer {i})", o) for i, o in enumerate(self.state.optimizers))
        for optimizer in self.state.optimizers:
            for j, group in enumerate(optimizer.param_groups):
                for name in (name for name in group if not is_plain(group[name]) and name not in ("params", "lr")):
                    roots[f"{type(optimizer).__name__}.param_groups[{j}][{name!r}]"] = group[name]
        for entry in self.request.entries:
            for name, leaf in zip(entry.names, entry.leaves, strict=True):
                if not is_plain(leaf) and not isinstance(leaf, torch.Tensor):
                    roots[f"{type(self.state.optimizers[entry.optimizer]).__name__}.state{name}"] = leaf
        for i, leaf in enumerate(self.request.leaves):
            if not isinstance(leaf, (torch.Tensor, nn.Module, Optimizer)):
                roots[f"argument {i}"] = leaf
        return roots

    def _run_step(self, observer: Observer, *fakes: torch.Tensor) -> list[Any]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(recurrent_without_mkldnn(self.state))
            if self.request.overrides is not None:
                stack.enter_context(self.request.overrides(self.state))
            stack.enter_context(self.watch.detect_fork_rng())
            stack.enter_context(self.watch)
            raised = stack.enter_context(recording_errors())
            user_code = stack.enter_context(UserCodeMode(self.watch, raised))
            stack.enter_context(refusing_values_as_text(user_code))
            stack.enter_context(refusing_object_collectives())
            stack.enter_context(compiled_functions_run_eagerly())
            self._install_fakes()
            self.substitution = Substitution(self._fakes_of_real(), self._param_fakes(), self._grads_and_states())
            stack.enter_context(self.substitution)
            stack.enter_context(only_optimizers(self.state.optimizers))
            if self.request.compiling:
                stack.enter_context(seen_as_compiling())
            args, kwargs = self._fake_arguments()
            before = structure(args, kwargs)
            stack.enter_context(self._attributes(observer).answering(self.fakes))
            with sizes_as_numbers(), observer.watching(self._roots()):
                result = self._call_step(args, kwargs)
            if raised:
                raise raised[0]  # the step has caught it; eager mode would not have raised it
            refuse_changed_arguments(before, structure(args, kwargs))
            refuse_changed_forms(self._fakes_with_real())
            return self._collect_effects(result)

    def _call_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        versions = write_counts(self.fakes)
        try:
            return self.request.step(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, SPMDError) and raised_by_user(error):
                self.request.raised_after_changes = self.watch.backwards > 0 or write_counts(self.fakes) != versions
            raise

    def _fakes_with_real(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        of = {"param": self.state.params, "grad": self.state.params, "buffer": self.state.buffers}
        found = [(s.kind, fake, of[s.kind][s.i].value) for s, fake in self.fake_of.items() if s.kind in of]
        return found + [("arg", f, self.request.leaves[s.i]) for s, f in self.fake_of.items() if s.kind == "arg"]

    def _attributes(self, observer: Observer) -> TensorAttributes:
        owner_of = {id(fake): (source.kind, source.i) for source, fake in self.fake_of.items()}
        owner_of = {i: owner for i, owner in owner_of.items() if owner[0] in ("param", "buffer", "arg")}
        return TensorAttributes(self.state, owner_of, self.request.leaves, observer.read_attribute)

    def _fake_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        request = self.request
        positions = first_of_same(request.leaves)
        leaves = iter([self.fake_of.get(InputSource("arg", i), request.leaves[i]) for i in positions])
        args = tuple(rebuild_arguments(arg, leaves) for arg in request.args)
        return args, {name: rebuild_arguments(arg, leaves) for name, arg in request.kwargs.items()}

    def _install_fakes(self) -> None:
        state = self.state
        for i, ref in enumerate(state.params):
            fake = self.fake_of[InputSource("param", i)]
            fake.grad = self.fake_of.get(InputSource("grad", i))
            if fake.requires_grad:
                sync_gradients_of(fake, i, ref.name, self.watch)
            for slot in ref.slots:
                put_parameter(slot.module, slot.name, fake)
        for i, ref in enumerate(state.buffers):
            for slot in ref.slots:
                slot.module._buffers[slot.name] = self.fake_of[InputSource("buffer", i)]
        for i, optimizer in enumerate(state.optimizers):
            optimizer.param_groups = [self._fake_group(i, j, group) for j, group in enumerate(optimizer.param_groups)]
            optimizer.state = defaultdict(dict)
            self.groups.append([dict(group) for group in optimizer.param_groups])
        for e, entry in enumerate(self.request.entries):
            leaves = [self.fake_of.get(InputSource("state", e, j), leaf) for j, leaf in enumerate(entry.leaves)]
            key = entry.key if entry.owner is None else self.fake_of[InputSource("param", entry.owner)]
            state.optimizers[entry.optimizer].state[key] = _tree.tree_unflatten(leaves, entry.spec)

    def _fake_group(self, i: int, j: int, group: dict[str, Any]) -> dict[str, Any]:
        params = [self.fake_of[InputSource("param", self.state.known_index(param))] for param in group["params"]]
        fake = {**group, "params": params}
        if self._lifts(group):
            lr = self.fake_of[InputSource("lr", i, j)]
            # Fused operations take the rate as a plain number; lowering replaces it with the graph's input.
            if isinstance(group["lr"], torch.Tensor):
                fake["lr"] = lr
            elif not group.get("fused") or self.request.compiling:
                fake["lr"] = lr.item()
        if (
            "foreach" in group
            and group["foreach"] is None
            and not group.get("fused")
            and not group.get("differentiable")
        ):
            fake["foreach"] = foreach_by_default(self.state.device)
        if self.request.compiling:
            # One plain form of the update, whatever form the user chose: inductor fuses operations by itself.
            forms = {"capturable": True, "fused": False, "foreach": False}
            fake.update({name: form for name, form in forms.items() if name in group})
        return fake

    def _fakes_of_real(self) -> dict[int, torch.Tensor]:
        """The fakes of parameters and buffers, by the id of the real one."""
        return {id(real): fake for real, fake in self._real_and_fake()}

    def _real_and_fake(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        params = [(ref.value, self.fake_of[InputSource("param", i)]) for i, ref in enumerate(self.state.params)]
        buffers = [(ref.value, self.fake_of[InputSource("buffer", i)]) for i, ref in enumerate(self.state.buffers)]
        return params + buffers

    def _grads_and_states(self) -> list[torch.Tensor]:
        """The real gradients and optimizer states. The step finds their fakes in parameters and optimizers."""
        with disable_torch_function():
            grads = [ref.value.grad for ref in self.state.params if ref.value.grad is not None]
        leaves = [leaf for entry in self.request.entries for leaf in entry.leaves]
        return grads + [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _param_fakes(self) -> list[torch.Tensor]:
        return [self.fake_of[InputSource("param", i)] for i in range(len(self.state.params))]

    # -- the effects of the step

    def _collect_effects(self, result: Any) -> list[Any]:
        outputs: list[Any] = []
        source_of = {id(fake): source for source, fake in self.fake_of.items()}
        given = {id(leaf): leaf for leaf in self.request.leaves if not isinstance(leaf, torch.Tensor)}
        kept = {id(leaf) for entry in self.request.entries for leaf in entry.leaves}

        def recipe(value: Any, does: str = "keeps in an optimizer's state") -> Recipe:
            if id(value) in source_of:
                return Recipe(source=source_of[id(value)])
            if is_fake(value) or isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                outputs.append(value)
                return Recipe(output=len(outputs) - 1)
            refuse_opaque(value, id(value) in given or id(value) in kept, does)
            return Recipe(constant=given.get(id(value), value))

        leaves, self.effects.result_structure = leaves_of(result)
        self.effects.result = [recipe(leaf, "returns") for leaf in leaves]
        self._collect_grads(recipe)
        self._collect_states(recipe)
        for i, ref in enumerate(self.state.buffers):
            now = ref.slots[0].module._buffers.get(ref.slots[0].name)
            new = recipe(now)
            if new.output is not None:
                self.effects.buffers[i] = new.output
            elif new.source != InputSource("buffer", i):
                raise SPMDError(
                    f"The step replaces the buffer {ref.name} with None, an input or another buffer.",
                    remedy="Copy the values: buffer.copy_(values), under torch.no_grad().",
                )
        refuse_rebound_parameters(self.state, self._param_fakes())
        refuse_new_buffers(self.state)
        return outputs

    def _collect_grads(self, recipe: Callable[[Any], Recipe]) -> None:
        for i in range(len(self.state.params)):
            before, now = self.fake_of.get(InputSource("grad", i)), self.fake_of[InputSource("param", i)].grad
            refuse_changed_requirement(self.state.params[i], self.fake_of[InputSource("param", i)])
            if now is before:
                continue
            new = Recipe() if now is None else recipe(now)
            if new.source is not None:  # a graph input, as with `p.grad = batch`
                raise SPMDError(
                    f"The step uses an input as the gradient of {self.state.params[i].name}.", remedy="Clone it first."
                )
            self.effects.grads[i] = new.output

    def _collect_states(self, recipe: Callable[[Any], Recipe]) -> None:
        param_of = {id(self.fake_of[InputSource("param", i)]): i for i in range(len(self.state.params))}
        before = {
            (entry.optimizer, entry.owner, entry.key if entry.owner is None else None): e
            for e, entry in enumerate(self.request.entries)
        }
        for o, optimizer in enumerate(self.state.optimizers):
            refuse_changed_groups(optimizer, self.groups[o])
            for key, value in optimizer.state.items():
                owner = param_of.get(id(key))
                paths, spec = _tree.tree_flatten_with_path(value)
                recipes = [recipe(leaf) for _, leaf in paths]
                entry = before.get((o, owner, key if owner is None else None))
                if entry is not None and self._unchanged(entry, spec, recipes):
                    continue
                names = [str(_tree.keystr(path)) for path, _ in paths]
                real_key = key if owner is None else None
                self.effects.states.append(NewState(o, owner, real_key, spec, recipes, names))

    def _unchanged(self, e: int, spec: Any, recipes: list[Recipe]) -> bool:
        entry = self.request.entries[e]
        if spec != entry.spec:
            return False
        same = True
        for j, (leaf, new) in enumerate(zip(entry.leaves, recipes, strict=True)):
            if isinstance(leaf, torch.Tensor):
                same = same and new.source == InputSource("state", e, j)
            elif new.output is None and new.source is None:
                refuse_python_counter(self.state, entry, j, leaf, new.constant)
            else:
                same = False
        return same


def _know_memory_of_captured(module: fx.GraphModule, mode: Any) -> None:
    """Give all nodes of one captured tensor values that share memory. The tracer makes a new value for each of them."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
            fake = fake_of_captured(mode, getattr(module, str(node.target)))
            if fake is not None:
                node.meta["val"], node.meta["captured"] = fake, True


def _storages_of(values: list[Any]) -> frozenset[int]:
    """The storages of those values that are tensors; of a DTensor, that of its local part."""
    tensors = [local_tensor(value) if isinstance(value, DTensor) else value for value in values]
    return frozenset(storage_key(t) for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided)


def _empty(like: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """An empty tensor like `like`. A tensor gathered from shards is contiguous."""
    if layout is None or not layout.sharded:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
