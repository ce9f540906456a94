"""Recording: runs a step once on fake tensors, and keeps its operations as a graph, and its effects."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from torch_testing_ext._machine.seeds import RandomState
from torch_testing_ext._torch import spmd

from ..engine.managed_params import managed_by
from ..engine.resting_state import put_parameter
from ..engine.row_optimizers import why_whole
from ..lower.buckets import Bucket
from ..lower.graphs import AVERAGE, SCATTER
from ..parallel_modes import Override, replace_submodules
from ..spmd_errors import SPMDError, raised_by_user, user_line_of
from .captured_state import CallArguments, CapturedState, InputSource
from .row_updates import RowUpdates, ShardedLeaf
from .snapshot import ModuleContents

spmd.import_tracer()
_tree = spmd.tree()
ENGINE = 'Drop backend="capture": the engine runs any Python.'
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Tensor)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OF_DTENSOR = ("_local_tensor", "_spec", "_is_param")


@dataclass(frozen=True)
class Recipe:
    """The source of one value after a run: graph output number `output`, the object of `source`, or `constant`."""

    output: int | None = None
    source: InputSource | None = None
    constant: Any = None


@dataclass
class StepEffects:
    """The results of a step, and the gradients that it replaces."""

    result: list[Recipe] = field(default_factory=list)
    result_spec: Any = None
    grads: dict[int, int | None] = field(default_factory=dict)  # parameter -> graph output, or None for no gradient
    # Of optimizers: only the engine runs such a call.
    makes_states: bool = False
    # A backward has reached a parameter.
    trains: bool = False
    # All ranks get rank 0's buffers before, as under DDP.
    shares_buffers: bool = False


@dataclass
class RecordedStep:
    """The graph of a step, with the sources of its inputs and the effects of its outputs.

    number: what ranks compare before they run it. 0: it neither communicates nor changes what they share.
    """

    module: fx.GraphModule
    sources: list[InputSource]  # one for each placeholder, in order
    effects: StepEffects
    buckets: list[Bucket] = field(default_factory=list)
    number: int = 0
    changed_by_user: bool = False  # by an override or a pass


def record(
    step: Callable[..., Any], call: CallArguments, state: CapturedState, overrides: list[Override]
) -> RecordedStep:
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
        self.step = step
        self.call = call
        self.state = state
        self.overrides = overrides
        self.mode = spmd.new_fake_mode()
        self.effects = StepEffects()
        self.leaves: list[torch.Tensor] = []  # the parameters as the step sees them
        self.sharded: dict[int, ShardedLeaf] = {}  # by the identity of a leaf
        sources = [*state.sources(call.leaves)]
        self.numbers = [source for source in sources if isinstance(state.value(source, call.leaves), float)]
        with self.mode:
            self.fakes = {source: _fake_like(state.value(source, call.leaves)) for source in sources}

    def run(self) -> RecordedStep:
        """Trace the step, and undo what that has changed."""
        contents = ModuleContents(self.state.found)
        random = RandomState()
        try:
            with self.mode, spmd.python_dispatcher():
                module = make_fx(self._run_step, tracing_mode="real")(*self.fakes.values())
        finally:
            contents.restore()
            random.restore()
        for node, source in zip(module.graph.nodes, self.fakes, strict=False):
            node.meta["is_number"] = source in self.numbers
        # The tracer makes a new value for each node of a captured tensor.
        for node in module.graph.nodes:
            if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
                fake = spmd.fake_of_captured(self.mode, getattr(module, str(node.target)))
                if fake is not None:
                    node.meta["val"] = fake
        return RecordedStep(module, [*self.fakes], self.effects)

    def _run_step(self, *_: torch.Tensor) -> list[Any]:
        """Run the step on fakes. Returns the outputs of the graph."""
        if self.overrides:
            replace_submodules(self.overrides, self.state.found.modules)
        with torch.no_grad():
            fakes = self._install()
        first = {id(leaf): i for i, leaf in reversed([*enumerate(self.call.leaves)])}
        found = [self.fakes.get(InputSource("arg", first[id(leaf)]), leaf) for leaf in self.call.leaves]
        args, kwargs = self.call.rebuilt(found)
        # mkldnn packs the weights of these.
        packs = any(isinstance(module, torch.nn.RNNBase) for module in self.state.modules)
        with Substitution(fakes), torch.backends.mkldnn.flags(enabled=False) if packs else nullcontext():
            result = self.step(*args, **kwargs)
        with torch.no_grad():
            for leaf in self.sharded.values():
                leaf.push()
        return self._collect(result)

    def _install(self) -> dict[int, torch.Tensor]:
        """Put fakes in place of all tensors of model and optimizers. Returns the fake of each, by its identity."""
        state = self.state
        fakes = {id(buffer): self.fakes[InputSource("buffer", i)] for i, buffer in enumerate(state.buffers)}
        for i, (managed, rest) in enumerate(zip(state.roster.params, state.rests, strict=True)):
            self.leaves.append(self._leaf(i, rest))
            fakes[id(rest)] = fakes[id(managed.plain)] = self.leaves[i]
        for slot in state.slots("_parameters"):
            put_parameter(slot.module, slot.name, fakes[id(slot.value)])
        for slot in state.slots("_buffers"):
            slot.module._buffers[slot.name] = fakes[id(slot.value)]
        numbers = iter(range(len(state.groups)))
        for optimizer in state.found.optimizers:
            optimizer.param_groups = [self._group(next(numbers), group, fakes) for group in optimizer.param_groups]
            optimizer.state = defaultdict(dict)
            if self.sharded and why_whole(optimizer) is None:
                RowUpdates(optimizer, self.sharded).install()
        for e, entry in enumerate(state.entries):
            leaves = [self.fakes.get(InputSource("state", e, j), leaf) for j, leaf in enumerate(entry.leaves)]
            key = entry.key if entry.owner is None else self.leaves[entry.owner]
            state.found.optimizers[entry.optimizer].state[key] = _tree.tree_unflatten(leaves, entry.spec)
        return fakes

    def _leaf(self, i: int, rest: torch.Tensor) -> torch.Tensor:
        fake, grad = self.fakes[InputSource("param", i)], self.fakes.get(InputSource("grad", i))
        shards = ShardedLeaf(i, fake, self.state.layouts[i]) if self.state.layouts[i].sharded else None
        leaf = fake if shards is None else shards.whole
        leaf.__dict__.update({name: value for name, value in rest.__dict__.items() if name not in _OF_DTENSOR})
        leaf._is_param = True
        leaf.requires_grad_(rest.requires_grad)
        if shards is not None:
            self.sharded[id(leaf)] = shards
            grad = None if grad is None else shards.gathered(grad)
        leaf.grad = grad
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(lambda leaf: self._average(i, leaf))  # type: ignore[no-untyped-call]
        return leaf

    def _average(self, i: int, leaf: torch.Tensor) -> None:
        """Put the mean over ranks in place of a gradient."""
        grad = leaf.grad
        layout = self.state.layouts[i]
        assert grad is not None
        self.effects.trains = True
        if grad.requires_grad or grad.layout is not torch.strided:
            kind = "keeps the graph of a gradient (create_graph)" if grad.requires_grad else "has a sparse gradient"
            raise SPMDError(f"The step {kind}, of {self.state.roster.params[i].name}.", remedy=ENGINE)
        if layout.sharded:
            leaf.grad = self.sharded[id(leaf)].gathered(SCATTER(grad, i, list(layout.local_shape)))
        elif layout.world > 1:
            leaf.grad = AVERAGE(grad, i, list(layout.shape))

    def _group(self, i: int, group: dict[str, Any], fakes: dict[int, torch.Tensor]) -> dict[str, Any]:
        fake = {**group, "params": [fakes.get(id(param), param) for param in group["params"]]}
        source = InputSource("lr", i)
        if source in self.fakes:
            fake["lr"] = self.fakes[source].item() if source in self.numbers else self.fakes[source]
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            # torch looks at the type of parameters.
            fake["foreach"] = spmd.foreach_by_default(self.leaves[0].device)
        return fake

    def _collect(self, result: Any) -> list[Any]:
        """Find where each value that the step returns, or leaves as a gradient, comes from. Returns the outputs."""
        outputs: list[Any] = []
        source_of = {id(fake): source for source, fake in self.fakes.items()}
        source_of.update({id(leaf): InputSource("param", i) for i, leaf in enumerate(self.leaves)})
        given = {id(leaf) for leaf in (*self.call.leaves, *self.state.modules, *self.state.found.optimizers)}

        def recipe(value: Any) -> Recipe:
            if id(value) in source_of:
                return Recipe(source=source_of[id(value)])
            if spmd.is_fake(value) or isinstance(value, _SYMBOLS):
                outputs.append(value.detach() if isinstance(value, torch.Tensor) else value)
                return Recipe(output=len(outputs) - 1)
            if not isinstance(value, _CONSTANTS) and id(value) not in given:
                raise SPMDError(f"The step returns or keeps an object of type {type(value).__name__}.", remedy=ENGINE)
            return Recipe(constant=value)

        leaves, self.effects.result_spec = _tree.tree_flatten(result)
        self.effects.result = [recipe(leaf) for leaf in leaves]
        for i, leaf in enumerate(self.leaves):
            grad = leaf.grad
            if grad is not None and id(leaf) in self.sharded:
                grad = self.sharded[id(leaf)].rows_of(grad)
            if grad is not self.fakes.get(InputSource("grad", i)):
                self.effects.grads[i] = None if grad is None else recipe(grad).output
        states = [leaf for o in self.state.found.optimizers for leaf in _tree.tree_leaves(dict(o.state))]
        known = {id(fake) for source, fake in self.fakes.items() if source.kind == "state"}
        self.effects.makes_states = {id(leaf) for leaf in states if spmd.is_fake(leaf)} != known
        return outputs


def _fake_like(value: Any) -> torch.Tensor:
    if isinstance(value, float):
        return torch.empty((), dtype=torch.float64, device="cpu")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class Substitution(TorchFunctionMode):
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
        if not isinstance(value, torch.Tensor) or spmd.is_fake(value) or id(value) in self.fakes:
            return self.fakes.get(id(value), value)
        if value.requires_grad or managed_by(value) is not None:
            shape = tuple(value.shape)
            raise SPMDError(f"The step uses a trainable tensor of shape {shape} that no module holds.", remedy=ENGINE)
        return value
