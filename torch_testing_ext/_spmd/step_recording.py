"""Records a step on fake tensors and makes a program of it."""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from torch_testing_ext._machine.accelerators import RandomState
from torch_testing_ext._process.words import first_names, size_in_words
from torch_testing_ext._torch import tracing

from .captured_state import CallArguments, CapturedState, InputSource, local_part
from .gradient_buckets import Wire, managed_by
from .lowering import (
    AVERAGE,
    GATHER,
    ROWS,
    SCATTER,
    Bucket,
    CollectiveOptions,
    clean_graph,
    is_collective,
    lasting_storages,
    lower_gathers,
    placeholders,
    remove_dead_code,
    schedule_gradients,
    storages,
    storages_written,
    write_to_buckets,
)
from .parallel_modes import GraphPass, Layout, Override, SPMDError, raised_by_user, replace_submodules, user_line_of
from .resting_state import put_parameter, rekey, why_whole
from .roster import ModuleContents

# --------------------------------------------------------------------------------------------------------------------
# Sharded parameters while a step is recorded: whole for the step, the rank's rows for optimizers that work by
# element.
#
# The rows are the graph's input. Whole parameters are gathered from them; what is written to one form is copied to
# the other before that is read. Copies that nothing reads are removed when the graph is cleaned.


class ShardedLeaf:
    """One parameter in both forms: `rows`, and the leaf `whole`, which is gathered from them."""

    def __init__(self, number: int, rows: torch.Tensor, layout: Layout) -> None:
        self.number, self.rows = number, rows
        self.shape, self.local_shape = list(layout.shape), list(layout.local_shape)
        self.whole: torch.Tensor = self.gathered(rows).detach()

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = GATHER(rows, self.number, self.shape)
        return whole

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = ROWS(whole.detach(), self.number, self.local_shape)
        return rows

    def push(self) -> None:
        """Copy the whole parameter to the rows. Cleaning removes this if the step has not written to it."""
        self.rows.copy_(self.rows_of(self.whole))


class RowUpdates:
    """Lets an optimizer, which works by element, update rows while a step is recorded."""

    def __init__(self, optimizer: Optimizer, leaves: dict[int, ShardedLeaf]) -> None:
        self.optimizer = optimizer
        self._inner: Any = optimizer.step
        # By the identity of the whole parameter.
        self._leaves = leaves

    def install(self) -> None:
        """Replace the optimizer's step. Whoever calls this restores the optimizer."""

        def step(closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad(), self._on_rows():
                result = self._inner()
            return result if closure is None else loss

        if hasattr(self._inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optimizer.__dict__["step"] = step

    @contextmanager
    def _on_rows(self) -> Iterator[None]:
        """Let the optimizer see the rows of parameters instead of the whole ones."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        used = [self._leaves[id(param)] for param in params if id(param) in self._leaves]
        rows_of = {id(leaf.whole): leaf.rows for leaf in used}
        whole_of = {id(leaf.rows): leaf.whole for leaf in used}
        for leaf in used:
            leaf.push()
            leaf.rows.grad = None if leaf.whole.grad is None else leaf.rows_of(leaf.whole.grad)
        rekey(self.optimizer, lambda param: rows_of.get(id(param), param))
        yield
        rekey(self.optimizer, lambda param: whole_of.get(id(param), param))
        for leaf in used:
            if leaf.rows.grad is not None:
                leaf.rows.grad = None
                leaf.whole.copy_(leaf.gathered(leaf.rows))


# --------------------------------------------------------------------------------------------------------------------
# Recording: runs a step once on fake tensors, and keeps its operations as a graph, and its effects.

tracing.import_tracer()
_tree = tracing.tree()
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
    # Parameter -> graph output, or None for no gradient.
    grads: dict[int, int | None] = field(default_factory=dict)
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
    # One for each placeholder, in order.
    sources: list[InputSource]
    effects: StepEffects
    buckets: list[Bucket] = field(default_factory=list)
    number: int = 0
    # By an override or a pass.
    changed_by_user: bool = False


def record_step(
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
        self.mode = tracing.new_fake_mode()
        self.effects = StepEffects()
        # The parameters as the step sees them.
        self.leaves: list[torch.Tensor] = []
        # By the identity of a leaf.
        self.sharded: dict[int, ShardedLeaf] = {}
        sources = [*state.sources(call.leaves)]
        self.numbers = [source for source in sources if isinstance(state.value(source, call.leaves), float)]
        with self.mode:
            self.fakes = {source: _fake_like(state.value(source, call.leaves)) for source in sources}

    def run(self) -> RecordedStep:
        """Trace the step, and undo what that has changed."""
        contents = ModuleContents(self.state.found)
        random = RandomState()
        try:
            with self.mode, tracing.python_dispatcher():
                module = make_fx(self._run_step, tracing_mode="real")(*self.fakes.values())
        finally:
            contents.restore()
            random.restore()
        for node, source in zip(module.graph.nodes, self.fakes, strict=False):
            node.meta["is_number"] = source in self.numbers
        # The tracer makes a new value for each node of a captured tensor.
        for node in module.graph.nodes:
            if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
                fake = tracing.fake_of_captured(self.mode, getattr(module, str(node.target)))
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
        leaves = [self.fakes.get(InputSource("arg", first[id(leaf)]), leaf) for leaf in self.call.leaves]
        args, kwargs = self.call.rebuilt(leaves)
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
            fake["foreach"] = tracing.foreach_by_default(self.leaves[0].device)
        return fake

    def _collect(self, result: Any) -> list[Any]:
        """Find where each value that the step returns, or leaves as a gradient, comes from. Returns the outputs."""
        outputs: list[Any] = []
        source_of = {id(fake): source for source, fake in self.fakes.items()}
        source_of.update({id(leaf): InputSource("param", i) for i, leaf in enumerate(self.leaves)})
        objects = (*self.call.leaves, *self.state.modules, *self.state.found.optimizers)
        given = {id(value) for value in objects}

        def recipe(value: Any) -> Recipe:
            if id(value) in source_of:
                return Recipe(source=source_of[id(value)])
            if tracing.is_fake(value) or isinstance(value, _SYMBOLS):
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
        self.effects.makes_states = {id(leaf) for leaf in states if tracing.is_fake(leaf)} != known
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
        if not isinstance(value, torch.Tensor) or tracing.is_fake(value) or id(value) in self.fakes:
            return self.fakes.get(id(value), value)
        if value.requires_grad or managed_by(value) is not None:
            shape = tuple(value.shape)
            raise SPMDError(f"The step uses a trainable tensor of shape {shape} that no module holds.", remedy=ENGINE)
        return value


# --------------------------------------------------------------------------------------------------------------------
# Programs: a lowered graph as a function, with the places that its inputs come from and its outputs go to.

_OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


class StepProgram:
    """One program, ready to be called with the leaves of a step's arguments."""

    def __init__(self, recorded: RecordedStep, state: CapturedState, leaves: list[Any]) -> None:
        self.recorded, self.effects, self.present = recorded, recorded.effects, state.present_grads()
        # Alive, as keys have their ids.
        self.objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self.run = function_of_graph(recorded.module)
        self.verified, self.calls, self.key = 0, 0, state.key()
        self.bind(state)

    @property
    def meets(self) -> bool:
        """Must the ranks run it together? It communicates or changes what they share, or the engine would."""
        return self.recorded.number != 0 or any(self.state.roster.plans.values())

    def bind(self, state: CapturedState) -> None:
        """Look up everything that stays the same from call to call."""
        self.state = state
        varying = ("arg", "grad", "lr")
        self._template: list[Any] = []
        self._varying: list[tuple[int, InputSource]] = []
        for position, source in enumerate(self.recorded.sources):
            varies = source.kind in varying
            self._template.append(None if varies else state.value(source, []))
            if varies:
                self._varying.append((position, source))

    def fits(self) -> bool:
        return self.state.guards.is_current() and self.state.present_grads() == self.present

    def __call__(self, leaves: list[Any]) -> Any:
        """Run with autograd and autocast off: the graph has both in it."""
        inputs: list[Any] = self._template.copy()
        grad_mode, guard, cast = torch.is_grad_enabled(), tracing.below_autograd(), self._autocast()
        tracing.set_grad_enabled(False)
        try:
            with tracing.disable_torch_function():
                for position, source in self._varying:
                    inputs[position] = self.state.value(source, leaves)
            outputs = self.run(inputs)
        finally:
            del guard
            tracing.set_grad_enabled(grad_mode)
            for device in cast:
                torch.set_autocast_enabled(device, True)
        with tracing.disable_torch_function():
            for i, index in self.effects.grads.items():
                rest, value = self.state.rests[i], None if index is None else outputs[index]
                rest.grad = (
                    tracing.dtensor_like(rest, value) if isinstance(rest, DTensor) and value is not None else value
                )
        self.calls += 1
        values = [self._made(recipe, outputs, leaves) for recipe in self.effects.result]
        return tracing.tree().tree_unflatten(values, self.effects.result_spec)

    def _autocast(self) -> list[str]:
        """Turn autocast off. Returns the devices for which it was on."""
        devices = [d for d in {"cpu", self.state.rests[0].device.type} if torch.is_autocast_enabled(d)]
        for device in devices:
            torch.set_autocast_enabled(device, False)
        return devices

    def _made(self, recipe: Recipe, outputs: Sequence[Any], leaves: list[Any]) -> Any:
        if recipe.output is not None:
            return outputs[recipe.output]
        return recipe.constant if recipe.source is None else self.state.object(recipe.source, leaves)


def function_of_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """A function that takes the values of all placeholders, in order, and returns the graph's outputs."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def bind(match: re.Match[str]) -> str:
        name = "_".join(match.groups())
        names[name] = tracing.fastest_operation(*match.groups())
        return f"{name}("

    source = _OPERATION.sub(bind, code.src)
    exec(compile(source, f"<spmd step {id(module):x}>", "exec"), names)
    forward = names["forward"]
    return lambda inputs: forward(module, *inputs)


@dataclass(frozen=True)
class StepReport:
    """A summary of the program of the last call. `print(step.report())` shows it."""

    name: str
    world: int
    recordings: int
    operations: int
    collectives: dict[str, int]
    buckets: list[Bucket]
    # How often.
    verified: int

    def __str__(self) -> str:
        count = ", ".join(f"{n} {name}" for name, n in self.collectives.items()) or "no collectives"
        verified = f"verified {self.verified} times" if self.verified else "not verified"
        lines = [
            f"{self.name}: {self.operations} operations, {count}; captured on {self.world} ranks, "
            f"recorded {self.recordings} times, {verified}"
        ]
        for number, bucket in enumerate(self.buckets):
            dtype = str(bucket.dtype).removeprefix("torch.")
            size, names = size_in_words(bucket.nbytes), first_names(bucket.names, 4)
            lines.append(f"  {number}: {bucket.collective:<14} {size:>10} {dtype}: {names}")
        return "\n".join(lines)


def report_of(name: str, program: StepProgram, recordings: int) -> StepReport:
    nodes = program.recorded.module.graph.nodes
    operations = sum(node.op not in ("placeholder", "output") for node in nodes)
    collectives = [str(node.target) for node in nodes if is_collective(node)]
    # Such as `_c10d_functional.all_reduce_.default`.
    kinds = Counter(target.split(".")[1].rstrip("_") for target in collectives)
    world = program.state.layouts[0].world
    return StepReport(name, world, recordings, operations, dict(kinds), program.recorded.buckets, program.verified)


# --------------------------------------------------------------------------------------------------------------------
# Makes programs: records a step, lowers the recording, and lets the user change the graph.


@dataclass
class GraphPasses:
    """The changes that a user makes to programs."""

    bucket_bytes: int | None = None
    overrides: list[Override] = field(default_factory=list)
    passes: list[GraphPass] = field(default_factory=list)

    def apply(self, module: fx.GraphModule, params: list[torch.Tensor]) -> tuple[fx.GraphModule, bool]:
        before = str(module.graph)
        for override in self.overrides:
            module = override.transform(module, params)
        for graph_pass in self.passes:
            module = graph_pass(module) or module
        module.graph.lint()
        module.recompile()
        return module, bool(self.overrides) or str(module.graph) != before


def make_program(
    step: Callable[..., Any], call: CallArguments, state: CapturedState, wire: Wire, passes: GraphPasses
) -> StepProgram:
    """Make the program for a call, without communication: ranks may record at different times."""
    recorded = record_step(step, call, state, passes.overrides)
    clean_graph(recorded.module.graph)
    names = [managed.name for managed in state.roster.params]
    options = CollectiveOptions(wire.group.group_name, wire.world, passes.bucket_bytes)
    module, recorded.buckets = _lower(recorded.module, state.layouts, names, options)
    params = [local_part(rest) for rest in state.rests]
    recorded.module, recorded.changed_by_user = passes.apply(module, params)
    recorded.number = _number_of(recorded.module.graph, _effects_on_shared(recorded, state))
    write_to_buckets(recorded.module)
    return StepProgram(recorded, state, call.leaves)


def _effects_on_shared(recorded: RecordedStep, state: CapturedState) -> list[str]:
    """The changes to gradients and states in which all ranks must agree."""
    effects = recorded.effects
    effects.shares_buffers = bool(state.roster.buffers) and (
        effects.trains or any(m.training for m in state.found.modules)
    )
    lines = [f"gradient {i} {'is lost' if out is None else 'is new'}" for i, out in effects.grads.items()]
    lines += ["shares buffers"] * effects.shares_buffers
    return lines + ["makes states"] * effects.makes_states


def _lower(
    module: fx.GraphModule, layouts: list[Layout], names: list[str], options: CollectiveOptions
) -> tuple[fx.GraphModule, list[Bucket]]:
    """Lower a clean graph, which is consumed. Returns one with collectives, and their buckets."""
    buckets: list[Bucket] = []
    if any(layout.sharded for layout in layouts):
        buckets = lower_gathers(module.graph, layouts, names, options)
    new, reductions = schedule_gradients(module.graph, layouts, names, options)
    remove_dead_code(new)
    new.lint()
    return fx.GraphModule(module, new), buckets + reductions


def _number_of(graph: fx.Graph, effects: list[str]) -> int:
    """The number that ranks compare before they run a program: of its collectives, and of what it changes.

    `effects` are other changes. The number is 0 if the program neither communicates nor changes what ranks share.
    """
    written = lasting_storages(graph).intersection(set().union(*map(storages_written, graph.nodes)))
    lines = [_describe(node) for node in graph.nodes if is_collective(node)]
    lines += effects
    lines += [f"changes input {i}" for i, node in enumerate(placeholders(graph)) if storages(node) & written]
    if not lines:
        return 0
    return 1 + zlib.crc32("\n".join(lines).encode())


def _describe(node: fx.Node) -> str:
    value: Any = node.meta.get("val")
    dtype = getattr(value, "dtype", "")
    shape = list(getattr(value, "shape", ()))
    return f"{node.target} of {dtype}{shape} {node.args[1:]}"
