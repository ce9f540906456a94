"""Recording: runs a step once on fake tensors, and keeps its operations as a graph, and its effects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_testing_ext._torch.spmd import (
    disable_torch_function,
    fake_of_captured,
    foreach_by_default,
    function_mode_class,
    import_tracer,
    is_fake,
    new_fake_mode,
    python_dispatcher,
    tree,
)

from ..engine.managed_params import managed_by
from ..engine.optimizer_kinds import why_whole
from ..engine.resting_state import put_parameter
from ..lower.markers import AVERAGE, SCATTER
from ..spmd_errors import SPMDError, raised_by_user, user_line_of
from .call_arguments import CallArguments
from .captured_state import CapturedState, StateEntry, lifts_rate, local_part
from .override import Override, replace_submodules
from .row_updates import RowUpdates, ShardedLeaf
from .snapshot import ModuleContents, RandomState

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode as Mode
else:
    Mode = function_mode_class()

import_tracer()
_tree = tree()
ENGINE = 'Drop backend="capture": the engine runs any Python.'
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class InputSource:
    """The place that a graph input is read from at each call.

    kind: "param", "grad", "buffer" (index i), "state" (entry i, leaf j), "lr" or "lr tensor" (group i), "arg" (leaf i).
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


@dataclass
class StepEffects:
    """The results of a step, and the gradients, optimizer states and buffers that it replaces."""

    result: list[Recipe] = field(default_factory=list)
    result_spec: Any = None
    grads: dict[int, int | None] = field(default_factory=dict)  # parameter -> graph output, or None for no gradient
    states: list[NewState] = field(default_factory=list)
    buffers: dict[int, int] = field(default_factory=dict)  # buffer -> graph output
    trains: bool = False  # whether a backward has reached a parameter
    shares_buffers: bool = False  # whether all ranks get rank 0's buffers before, as under DDP


@dataclass
class RecordedStep:
    """The graph of one rank's step, with the sources of its inputs and the effects of its outputs."""

    graph: fx.GraphModule
    sources: list[InputSource]  # one for each placeholder, in order
    effects: StepEffects


def record(step: Callable[..., Any], call: CallArguments, state: CapturedState, overrides: list[Override]) -> RecordedStep:
    """Record a step. Model and optimizers are as before, whether it succeeds or fails."""
    call.admit()
    try:
        return _Recording(step, call, state, overrides).run()
    except SPMDError:
        raise
    except Exception as error:
        if raised_by_user(error):
            raise
        remedy = ENGINE if torch.is_grad_enabled() else "Call it outside of no_grad and inference_mode."
        raise SPMDError(
            f"The step cannot be recorded: {type(error).__name__}: {error}", remedy=remedy, where=user_line_of(error)
        ) from error


class _Recording:
    def __init__(
        self, step: Callable[..., Any], call: CallArguments, state: CapturedState, overrides: list[Override]
    ) -> None:
        self.step, self.call, self.state, self.overrides = step, call, state, overrides
        self.mode = new_fake_mode()
        self.sources: dict[InputSource, torch.Tensor] = {}
        self.effects = StepEffects()
        self.leaves: list[torch.Tensor] = []  # the parameters as the step sees them
        self.sharded: dict[int, ShardedLeaf] = {}  # by the identity of a leaf
        self.buffer_slots: list[tuple[torch.nn.Module, str]] = []

    def run(self) -> RecordedStep:
        with self.mode:
            self._make_fakes()
        contents, random = ModuleContents(self.state.found), RandomState()
        try:
            with self.mode, python_dispatcher():
                graph = make_fx(self._run_step, tracing_mode="real")(*self.sources.values())
        finally:
            contents.restore()
            random.restore()
        self._annotate(graph)
        return RecordedStep(graph, [*self.sources], self.effects)

    def _annotate(self, module: fx.GraphModule) -> None:
        for node, source in zip(module.graph.nodes, self.sources, strict=False):
            node.meta["is_number"] = source.kind == "lr"
        for node in module.graph.nodes:  # the tracer makes a new value for each node of a captured tensor
            if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
                fake = fake_of_captured(self.mode, getattr(module, str(node.target)))
                node.meta["val"] = node.meta["val"] if fake is None else fake

    # -- the inputs

    def _add(self, source: InputSource, like: torch.Tensor) -> None:
        fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        self.sources[source] = fake

    def _make_fakes(self) -> None:
        state = self.state
        for i in range(len(state.params)):
            self._add(InputSource("param", i), state.local(i))
        with disable_torch_function():
            grads = [rest.grad for rest in state.rests]
        for i, grad in enumerate(grads):
            if grad is not None:
                self._add(InputSource("grad", i), _dense(local_part(grad), state.names[i]))
        for e, entry in enumerate(state.entries):
            for j, leaf in enumerate(entry.leaves):
                if isinstance(leaf, torch.Tensor):
                    self._add(InputSource("state", e, j), _dense(local_part(leaf), "an optimizer's state"))
        for i, buffer in enumerate(state.buffers):
            self._add(InputSource("buffer", i), buffer)
        for i, group in enumerate(state.groups):
            rate = group["lr"] if lifts_rate(group) else None
            if isinstance(rate, torch.Tensor):
                self._add(InputSource("lr tensor", i), rate)
            elif rate is not None:  # fused operations take no symbols
                kind = "lr tensor" if group.get("fused") else "lr"
                self._add(InputSource(kind, i), torch.empty((), dtype=torch.float64, device="cpu"))
        first: dict[int, int] = {}
        for i, leaf in enumerate(self.call.leaves):
            if isinstance(leaf, torch.Tensor) and first.setdefault(id(leaf), i) == i:
                self._add(InputSource("arg", i), leaf)

    def _install(self) -> dict[int, torch.Tensor]:
        """Put fakes in place of all tensors of model and optimizers. Returns the fake of each, by its identity."""
        state = self.state
        fakes: dict[int, torch.Tensor] = {}
        for i, (managed, rest) in enumerate(zip(state.params, state.rests, strict=True)):
            leaf = self._leaf(i, rest)
            self.leaves.append(leaf)
            fakes[id(rest)] = fakes[id(managed.plain)] = leaf
        for i, buffer in enumerate(state.buffers):
            fakes[id(buffer)] = self.sources[InputSource("buffer", i)]
        for module, name, value in state.slots("_parameters"):
            put_parameter(module, name, fakes[id(value)])
        slots: dict[int, tuple[torch.nn.Module, str]] = {}
        for module, name, value in state.slots("_buffers"):
            module._buffers[name] = fakes[id(value)]
            slots.setdefault(id(value), (module, name))
        self.buffer_slots = [slots[id(buffer)] for buffer in state.buffers]
        numbers = iter(range(len(state.groups)))
        for optimizer in state.optimizers:
            optimizer.param_groups = [self._group(next(numbers), group, fakes) for group in optimizer.param_groups]
            optimizer.state = defaultdict(dict)
            if self.sharded and why_whole(optimizer) is None:
                RowUpdates(optimizer, self.sharded).install()
        for e, entry in enumerate(state.entries):
            leaves = [self.sources.get(InputSource("state", e, j), leaf) for j, leaf in enumerate(entry.leaves)]
            key = entry.key if entry.owner is None else self.leaves[entry.owner]
            state.optimizers[entry.optimizer].state[key] = _tree.tree_unflatten(leaves, entry.spec)
        return fakes

    def _leaf(self, i: int, rest: torch.Tensor) -> torch.Tensor:
        fake = self.sources[InputSource("param", i)]
        grad = self.sources.get(InputSource("grad", i))
        shards = ShardedLeaf(i, fake, self.state.layouts[i]) if self.state.layouts[i].sharded else None
        leaf = fake if shards is None else shards.whole
        leaf.__dict__.update({name: value for name, value in rest.__dict__.items() if name not in _OF_DTENSOR})
        leaf._is_param = True  # type: ignore[attr-defined]
        leaf.requires_grad_(rest.requires_grad)
        if grad is not None:
            leaf.grad = grad if shards is None else shards.gathered(grad)
        if shards is not None:
            self.sharded[id(leaf)] = shards
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(lambda leaf: self._average(i, leaf))  # type: ignore[no-untyped-call]
        return leaf

    def _average(self, i: int, leaf: torch.Tensor) -> None:
        grad = leaf.grad
        assert grad is not None
        self.effects.trains = True
        if grad.requires_grad or grad.layout is not torch.strided:
            kind = "keeps the graph of a gradient (create_graph)" if grad.requires_grad else "has a sparse gradient"
            raise SPMDError(f"The step {kind}, of {self.state.names[i]}.", remedy=ENGINE)
        layout, shards = self.state.layouts[i], self.sharded.get(id(leaf))
        if shards is not None:
            leaf.grad = shards.gathered(SCATTER(grad, i, list(layout.local_shape)))
        elif layout.world > 1:
            leaf.grad = AVERAGE(grad, i, list(layout.shape))

    def _group(self, i: int, group: dict[str, Any], fakes: dict[int, torch.Tensor]) -> dict[str, Any]:
        fake = {**group, "params": [fakes.get(id(param), param) for param in group["params"]]}
        if (rate := self.sources.get(InputSource("lr tensor", i))) is not None:
            fake["lr"] = rate
        elif (rate := self.sources.get(InputSource("lr", i))) is not None:
            fake["lr"] = rate.item()
        chosen = group.get("fused") or group.get("differentiable")
        if group.get("foreach", False) is None and not chosen:
            fake["foreach"] = foreach_by_default(self.state.local(0).device)  # torch looks at the type of parameters
        return fake

    # -- the run

    def _run_step(self, *_: torch.Tensor) -> list[Any]:
        if self.overrides:
            replace_submodules(self.overrides, self.state.found.modules)
        with torch.no_grad():
            fakes = self._install()
        groups = [dict(group) for optimizer in self.state.optimizers for group in optimizer.param_groups]
        args, kwargs = self.call.rebuilt([self._argument(leaf) for leaf in self.call.leaves])
        recurrent = any(isinstance(module, torch.nn.RNNBase) for module in self.state.modules)
        plain_kernels = torch.backends.mkldnn.flags(enabled=False) if recurrent else nullcontext()  # can be recorded
        with Substitution(fakes), plain_kernels:
            result = self.step(*args, **kwargs)
        for leaf in self.sharded.values():
            with torch.no_grad():
                leaf.push()
        return self._collect(result, groups)

    def _argument(self, leaf: Any) -> Any:
        position = next((i for i, other in enumerate(self.call.leaves) if other is leaf), 0)
        return self.sources.get(InputSource("arg", position), leaf)

    # -- the effects

    def _collect(self, result: Any, groups: list[dict[str, Any]]) -> list[Any]:
        outputs: list[Any] = []
        source_of = {id(fake): source for source, fake in self.sources.items()}
        source_of.update({id(leaf): InputSource("param", i) for i, leaf in enumerate(self.leaves)})
        given = {id(leaf) for leaf in (*self.call.leaves, *self.state.modules, *self.state.optimizers)}

        def recipe(value: Any) -> Recipe:
            if id(value) in source_of:
                return Recipe(source=source_of[id(value)])
            if is_fake(value) or isinstance(value, _SYMBOLS):
                outputs.append(value.detach() if isinstance(value, torch.Tensor) else value)
                return Recipe(output=len(outputs) - 1)
            if not isinstance(value, (*_CONSTANTS, torch.Tensor)) and id(value) not in given:
                raise SPMDError(f"The step returns or keeps an object of type {type(value).__name__}.", remedy=ENGINE)
            return Recipe(constant=value)

        leaves, self.effects.result_spec = _tree.tree_flatten(result)
        self.effects.result = [recipe(leaf) for leaf in leaves]
        self._collect_grads(recipe)
        for i, (module, name) in enumerate(self.buffer_slots):
            new = recipe(module._buffers.get(name))
            if new.output is not None:
                self.effects.buffers[i] = new.output
        self._collect_states(recipe)
        now = [group for optimizer in self.state.optimizers for group in optimizer.param_groups]
        if len(now) != len(groups) or any(new[k] is not old.get(k) for old, new in zip(groups, now, strict=True) for k in new):
            raise SPMDError("The step changes the groups of an optimizer, such as a learning rate.", remedy=ENGINE)
        return outputs

    def _collect_grads(self, recipe: Callable[[Any], Recipe]) -> None:
        for i, leaf in enumerate(self.leaves):
            before, now = self.sources.get(InputSource("grad", i)), leaf.grad
            if now is not None and id(leaf) in self.sharded:
                now = self.sharded[id(leaf)].rows_of(now)
            if now is not before:
                self.effects.grads[i] = None if now is None else recipe(now).output

    def _collect_states(self, recipe: Callable[[Any], Recipe]) -> None:
        index = {id(leaf): i for i, leaf in enumerate(self.leaves)}
        before = {(e.optimizer, e.owner, None if e.owner is not None else e.key): n for n, e in enumerate(self.state.entries)}
        for o, optimizer in enumerate(self.state.optimizers):
            for key, value in optimizer.state.items():
                owner = index.get(id(key))
                real_key = key if owner is None else None
                leaves, spec = _tree.tree_flatten(value)
                recipes = [recipe(leaf) for leaf in leaves]
                number = before.get((o, owner, real_key))
                if number is None or not _unchanged(number, self.state.entries[number], spec, recipes):
                    self.effects.states.append(NewState(o, owner, real_key, spec, recipes))


_OF_DTENSOR = ("_local_tensor", "_spec", "_is_param")


def _dense(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise SPMDError(f"The gradient of {name} is sparse.", remedy=ENGINE)
    return tensor


def _unchanged(number: int, entry: StateEntry, spec: Any, recipes: list[Recipe]) -> bool:
    if spec != entry.spec:
        return False
    same = True
    for j, (leaf, new) in enumerate(zip(entry.leaves, recipes, strict=True)):
        if isinstance(leaf, torch.Tensor):
            same = same and new.source == InputSource("state", number, j)
        elif new.output is None and new.source is None and new.constant != leaf:
            raise SPMDError(f"An optimizer counts in Python: {leaf!r} becomes {new.constant!r}.", remedy=ENGINE)
        else:
            same = same and new.output is None
    return same


class Substitution(Mode):
    """Puts fakes in place of real tensors of the model, which a step may hold in a list."""

    def __init__(self, fakes: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._substituted(args), **self._substituted(kwargs or {}))

    def _substituted(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return {key: self._substituted(item) for key, item in value.items()}
        if kind is tuple or kind is list:
            return kind([self._substituted(item) for item in value])
        if not isinstance(value, torch.Tensor) or is_fake(value):
            return value
        if id(value) not in self.fakes and (value.requires_grad or managed_by(value) is not None):
            raise SPMDError(
                f"The step uses a trainable tensor of shape {tuple(value.shape)} that no module of it holds.",
                remedy=ENGINE,
            )
        return self.fakes.get(id(value), value)
