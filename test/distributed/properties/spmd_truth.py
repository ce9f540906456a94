"""The ground truth for random training programs: eager training under DDP or FSDP2, compared with the compiled step.

`check(program)` runs a program both ways in every rank and says how it ended: right, refused, or a fault. Everything is
compared after each call: what the step returns, parameters, gradients, buffers, optimizer states, the random generator.
"""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import linecache
import random
import weakref
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext.distributed._spmd import DataParallel, SPMDError, compile

# All programs compute in float64. So a difference is a fault, and not rounding that an optimizer amplifies.
TOLERANCE = 1e-6
# A rank that another one waits for this long hangs.
TIMEOUT = datetime.timedelta(seconds=30)

RIGHT, REFUSED, WRONG, ERROR, HANG, INVALID = "right", "refused", "wrong", "error", "hang", "invalid"


@dataclass(frozen=True)
class TrainingProgram:
    """A training as Python source: a model, its optimizers, a step, and what happens before each call of the step.

    `source` defines `build()`, which returns a dict: `modules` and `optimizers`, which the step takes in this order,
    the `step`, `batch(x, y)`, which packs a batch, and `change(call)`, which runs before each call. `sizes` has the
    batch size of each rank for each call; with fewer ranks, the first sizes are used.
    """

    source: str
    sizes: tuple[tuple[int, ...], ...]
    width: int
    style: str = "replicate"
    options: tuple[tuple[str, Any], ...] = ()
    odd: tuple[str, ...] = ()  # what is not of the mainstream in it; without any, it must not be refused
    fsdp: bool = False  # also compare with FSDP2

    def __repr__(self) -> str:
        fields = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.name != "source"]
        return f'TrainingProgram(\n"""\n{self.source}""", {", ".join(fields)})'


@dataclass(frozen=True)
class TrainingOutcome:
    """How a program ended in one rank or in all of them: its kind, the call it ended in, and details."""

    kind: str
    call: int = 0
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind} in call {self.call}: {self.details}"


class TransparentDDP(DistributedDataParallel):
    """DDP that a step can use like the plain module: its attributes and names are those of the module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


_OF_THE_MODULE = (
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children",
    "named_children", "state_dict", "load_state_dict", "apply", "get_submodule",
)  # fmt: skip


class Training:
    """One run of a program in this rank: a fresh model with this rank's weights, and this rank's data."""

    def __init__(self, program: TrainingProgram, rank: int) -> None:
        self.program, self.rank = program, rank
        _seed(rank)
        namespace: dict[str, Any] = {"__name__": "spmd_program"}
        filename = f"/spmd_program_{abs(hash(program.source)):x}.py"
        lines = program.source.splitlines(keepends=True)
        linecache.cache[filename] = (len(program.source), None, lines, filename)  # for the lines in errors
        exec(builtins.compile(program.source, filename, "exec", dont_inherit=True), namespace)
        parts = namespace["build"]()
        self.modules: dict[str, nn.Module] = parts["modules"]
        self.optimizers: dict[str, torch.optim.Optimizer] = parts["optimizers"]
        self.step, self.batch, self.change = parts["step"], parts["batch"], parts["change"]
        self.called: dict[str, Any] = dict(self.modules)  # what the step gets for each module
        self.before: dict[str, Any] = {}
        self.randomness: Any = None

    def call(self, number: int, step: Any = None) -> Any:
        """Make the changes before call `number`, then call the step with this rank's batch."""
        size = self.program.sizes[number][self.rank % len(self.program.sizes[number])]
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        x = torch.randn(size, self.program.width, generator=generator)
        y = torch.randn(size, self.program.width, generator=generator)
        self.change(number)
        self.prepare(number)
        batch = self.batch(x, y)
        self.before = recorded(self.state())
        _seed(100 * number + self.rank)
        result = (step or self.step)(*self.called.values(), *self.optimizers.values(), batch)
        self.randomness = torch.get_rng_state(), random.getstate()[1], numpy.random.get_state()[1].tolist()
        return result

    def start_from_rank_0(self) -> None:
        """Give all ranks rank 0's weights and buffers."""
        for module in self.modules.values():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), 0)

    def prepare(self, number: int) -> None:
        """Whatever must follow changes before a call."""

    def state(self) -> dict[str, Any]:
        """All parameters, gradients, buffers and optimizer states, by name."""
        found: dict[str, Any] = {}
        names: dict[Any, str] = {}
        for title, module in self.modules.items():
            for name, param in module.named_parameters():
                names.setdefault(param, f"{title}.{name}")
                found[f"{title}.{name}"], found[f"gradient of {title}.{name}"] = param, param.grad
            for name, buffer in module.named_buffers():
                found[f"buffer {title}.{name}"] = buffer
        for title, optimizer in self.optimizers.items():
            held = [param for group in optimizer.param_groups for param in group["params"]]
            names |= {param: f"parameter {i}" for i, param in enumerate(held) if param not in names}
            for key, values in optimizer.state.items():
                for name, value in values.items() if isinstance(values, dict) else [("", values)]:
                    found[f"{title}'s {name} of {names.get(key, key)}"] = value
        return found


class DDPTraining(Training):
    """The reference: the eager step, with modules in DDP."""

    def __init__(self, program: TrainingProgram, rank: int) -> None:
        super().__init__(program, rank)
        self.start_from_rank_0()
        self.structure: Any = None

    def prepare(self, number: int) -> None:
        # DDP does not see a layer that was replaced or frozen: wrap the changed module again, as a user would.
        structure = [[(id(p), p.requires_grad) for p in module.parameters()] for module in self.modules.values()]
        if structure != self.structure:
            self.structure = structure
            self.called = {}
            for title, module in self.modules.items():
                trainable = any(p.requires_grad for p in module.parameters())
                self.called[title] = wrap(module) if trainable else module
        for title, module in self.modules.items():
            self.called[title].training = module.training  # the program may have changed that of the module only


def wrap(module: nn.Module) -> Any:
    wrapped = TransparentDDP(module, find_unused_parameters=True)
    for name in _OF_THE_MODULE:
        object.__setattr__(wrapped, name, getattr(module, name))
    return wrapped


class AveragedTraining(Training):
    """The reference for programs with several backwards of one forward, of which DDP averages only the first.

    Each gradient is averaged whenever something was added to it.
    """

    def __init__(self, program: TrainingProgram, rank: int) -> None:
        super().__init__(program, rank)
        self.hooked: set[torch.Tensor] = set()
        self.start_from_rank_0()

    def prepare(self, number: int) -> None:
        for module in self.modules.values():
            for buffer in module.buffers():  # as DDP does
                dist.broadcast(buffer, 0)
            for param in module.parameters():
                if param.requires_grad and param not in self.hooked:
                    self.hooked.add(param)
                    param.register_post_accumulate_grad_hook(_average)


def _average(param: torch.Tensor) -> None:
    assert param.grad is not None
    mean = param.grad.to_dense().contiguous() / dist.get_world_size()
    dist.all_reduce(mean)
    param.grad = mean.to_sparse(param.grad.sparse_dim()) if param.grad.is_sparse else mean


class FSDPTraining(Training):
    """The reference for programs of the mainstream: the eager step, with modules sharded by FSDP2."""

    def __init__(self, program: TrainingProgram, rank: int) -> None:
        super().__init__(program, rank)
        self.start_from_rank_0()
        for module in self.modules.values():
            fully_shard(module)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def recorded(value: Any) -> Any:
    """A copy of a tensor, a container or a plain value, which later calls do not change."""
    leaves, spec = torch.utils._pytree.tree_flatten(value)
    return torch.utils._pytree.tree_unflatten([_copy(leaf) for leaf in leaves], spec)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        return _Part(leaf.to_local().detach().clone(), tuple(leaf.shape), leaf.placements[0].is_shard())
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


@dataclass(frozen=True)
class _Part:
    """This rank's part of a DTensor."""

    local: torch.Tensor
    shape: tuple[int, ...]
    sharded: bool


def difference(mine: Any, theirs: Any) -> str | None:
    """How two recorded values differ, if they do. Needs no communication: shards are compared with their rows."""
    if isinstance(mine, _Part):
        if not isinstance(theirs, (_Part, torch.Tensor)) or tuple(theirs.shape) != mine.shape:
            return f"a DTensor of shape {mine.shape} instead of {_kind(theirs)}"
        theirs = theirs if isinstance(theirs, _Part) else _part_of(theirs, mine.sharded)
        return difference(mine.local, theirs.local)
    if isinstance(theirs, _Part):
        return difference(_part_of(mine, theirs.sharded), theirs) if isinstance(mine, torch.Tensor) else _kind(mine)
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{_kind(mine)} instead of {_kind(theirs)}"
        mine, theirs = (t.to_dense() if t.layout != torch.strided else t for t in (mine, theirs))
        if not torch.allclose(mine, theirs, TOLERANCE, TOLERANCE, equal_nan=True):
            return f"differs by {(mine.double() - theirs.double()).abs().max().item():.2g}"
        return None
    if isinstance(mine, float) and isinstance(theirs, float):
        return None if abs(mine - theirs) <= TOLERANCE * (1 + abs(theirs)) or mine != mine else f"{mine}, not {theirs}"
    if type(mine) is not type(theirs) or (isinstance(mine, (int, str, type(None))) and mine != theirs):
        return f"{_kind(mine)} instead of {_kind(theirs)}"
    return None


def _part_of(whole: torch.Tensor, sharded: bool) -> _Part:
    if not sharded:
        return _Part(whole, tuple(whole.shape), False)
    whole = whole if whole.layout == torch.strided else whole.to_dense()
    rows = -(-whole.shape[0] // dist.get_world_size())
    start = dist.get_rank() * rows
    return _Part(whole[start : start + rows], tuple(whole.shape), True)


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]


@dataclass
class _Record:
    """What one call of a training left behind."""

    result: Any
    state: dict[str, Any]
    randomness: Any


def _record(training: Training, result: Any) -> _Record:
    return _Record(recorded(opened(result)), recorded(training.state()), training.randomness)


def opened(value: Any) -> Any:
    """A dataclass as its name and its fields. Each training of a program has a dataclass of its own."""
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return value


def first_difference(mine: _Record, theirs: _Record, uses_random: bool) -> str | None:
    """The first difference between what two calls left behind."""
    mine_leaves, mine_spec = torch.utils._pytree.tree_flatten(mine.result)
    their_leaves, their_spec = torch.utils._pytree.tree_flatten(theirs.result)
    if len(mine_leaves) != len(their_leaves):
        return f"the result has another structure: {mine_spec} instead of {their_spec}"
    for number, pair in enumerate(zip(mine_leaves, their_leaves, strict=True)):
        if found := difference(*pair):
            return f"result {number} {found}"
    if missing := mine.state.keys() ^ theirs.state.keys():
        return f"only one of them has {sorted(missing)}"
    for name, value in mine.state.items():
        if found := difference(value, theirs.state[name]):
            return f"{name} {found}"
    if not torch.equal(mine.randomness[0], theirs.randomness[0]):
        return "torch's random generator is in another state"
    if uses_random and mine.randomness[1:] != theirs.randomness[1:]:
        return "the random generator of Python or numpy is in another state"
    return None


_status_groups: Any = weakref.WeakKeyDictionary()


def _agree(mine: TrainingOutcome, group: Any) -> list[TrainingOutcome]:
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine, group=group)
    return outcomes


def check(program: TrainingProgram, verify: str | None = None) -> TrainingOutcome:
    """Run `program` eagerly and compiled, in all ranks. The outcome is that of all ranks."""
    torch.set_default_dtype(torch.float64)
    world = dist.group.WORLD
    if world not in _status_groups:
        _status_groups[world] = dist.new_group(timeout=TIMEOUT)
    return _Check(program, verify, _status_groups[world]).run()


class _Check:
    def __init__(self, program: TrainingProgram, verify: str | None, group: Any) -> None:
        self.program, self.verify, self.group, self.rank = program, verify, group, dist.get_rank()

    def run(self) -> TrainingOutcome:
        truths: list[list[_Record]] = []
        first = AveragedTraining if self.program.source.count(".backward(") > 1 else DDPTraining
        for kind in (first, FSDPTraining) if self.program.fsdp else (first,):
            records, ended = self._reference(kind)
            if ended is None:
                truths.append(records)
            elif kind is first:
                return ended
        return self._compiled(truths)

    def _reference(self, kind: type[Training]) -> tuple[list[_Record], TrainingOutcome | None]:
        records = []
        training = None
        for number in range(len(self.program.sizes)):
            mine = TrainingOutcome(RIGHT)
            try:
                training = training or kind(self.program, self.rank)
                records.append(_record(training, training.call(number)))
            except Exception as error:
                mine = TrainingOutcome(INVALID, number, f"{type(error).__name__}: {error}")
            bad = [each for each in _agree(mine, self.group) if each.kind != RIGHT]
            if bad:
                return records, bad[0]
        return records, None

    def _compiled(self, truths: list[list[_Record]]) -> TrainingOutcome:
        program = self.program
        training = Training(program, self.rank)
        options = {} if self.verify is None else {"verify": self.verify}
        step = compile(parallel_mode=DataParallel(program.style, **dict(program.options)), **options)(training.step)
        for number in range(len(program.sizes)):
            mine = self._call(training, step, number, truths)
            try:
                outcomes = _agree(mine, self.group)
            except RuntimeError as error:
                return TrainingOutcome(HANG, number, f"this rank: {mine}; the others did not arrive ({error})"[:600])
            ended = self._joint(outcomes)
            if ended is not None:
                return ended
        return TrainingOutcome(RIGHT, len(program.sizes))

    def _call(self, training: Training, step: Any, number: int, truths: Any) -> TrainingOutcome:
        try:
            result = training.call(number, step)
        except SPMDError as error:
            if "Optimizers updated rows" in str(error):  # known when the step has run, and cannot be undone
                return TrainingOutcome(REFUSED, number, f"{error}"[:600])
            now = recorded(training.state())
            for name in training.before.keys() | now.keys():
                if found := difference(now.get(name), training.before.get(name)):
                    return TrainingOutcome(WRONG, number, f"refused, but changed {name}, which {found}: {error}"[:600])
            return TrainingOutcome(REFUSED, number, str(error))
        except Exception as error:
            return TrainingOutcome(ERROR, number, f"{type(error).__name__}: {error}"[:1500])
        record = _record(training, result)
        uses_random = "random.random" in self.program.source or "numpy.random" in self.program.source
        found = [first_difference(record, truth[number], uses_random) for truth in truths]
        if all(found):
            return TrainingOutcome(WRONG, number, str(found[0]))
        return TrainingOutcome(RIGHT, number)

    def _joint(self, outcomes: list[TrainingOutcome]) -> TrainingOutcome | None:
        """The outcome of all ranks, if the program has ended."""
        kinds = {outcome.kind for outcome in outcomes}
        if kinds == {RIGHT}:
            return None
        for kind in (ERROR, WRONG):
            for rank, outcome in enumerate(outcomes):
                if outcome.kind == kind:
                    return dataclasses.replace(outcome, details=f"rank {rank}: {outcome.details}")
        first = next(outcome for outcome in outcomes if outcome.kind == REFUSED)
        if kinds == {REFUSED}:
            return first
        right = [rank for rank, outcome in enumerate(outcomes) if outcome.kind == RIGHT]
        return dataclasses.replace(first, kind=ERROR, details=f"only some ranks refused, not {right}: {first.details}")
