"""The truth of random training programs: eager training under DDP, compared with the compiled step after each call.

`check(recipe)` runs a program both ways in every rank and says how it ended: right, refused, or a fault. Everything is
compared: what the step returns, parameters, gradients, buffers, optimizer states, the random generator.
"""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import linecache
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from spmd_programs import Recipe
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext.distributed._spmd import DataParallel, SPMDError, compile

# All programs compute in float64. So a difference is a fault, and not rounding that an optimizer amplifies.
TOLERANCE = 1e-6
# A rank that another one waits for this long hangs.
TIMEOUT = datetime.timedelta(seconds=30)

RIGHT, REFUSED, WRONG, ERROR, HANG, INVALID = "right", "refused", "wrong", "error", "hang", "invalid"


@dataclass(frozen=True)
class TrainingOutcome:
    """How a program ended in one rank or in all of them: its kind, the call it ended in, and details."""

    kind: str
    call: int = 0
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind} in call {self.call}: {self.details}"


class Refused(Exception):
    """torch refuses what the program does between calls."""


class Training:
    """One run of a program in this rank: a fresh model with this rank's weights, and this rank's data."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe, self.rank = recipe, rank
        torch.manual_seed(rank)
        source = recipe.source()
        filename = f"/spmd_program_{abs(hash(source)):x}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for errors
        namespace: dict[str, Any] = {"__name__": "spmd_program"}
        exec(builtins.compile(source, filename, "exec", dont_inherit=True), namespace)
        parts = namespace["build"]()
        self.module: nn.Module = parts["model"]
        self.optimizer: torch.optim.Optimizer = parts["optimizer"]
        self.step, self.change = parts["step"], parts["change"]
        self.model: Any = self.module  # what the step gets
        self.randomness: Any = None

    def call(self, number: int, step: Any = None) -> Any:
        """Make the changes before call `number`, then call the step with this rank's batch."""
        sizes, width = self.recipe.sizes[number], self.recipe.width
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        batch = tuple(torch.randn(sizes[self.rank % len(sizes)], width, generator=generator) for _ in range(2))
        try:
            self.change(number)
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)) from error
        self.prepare()
        torch.manual_seed(100 * number + self.rank)
        result = (step or self.step)(self.model, self.optimizer, batch)
        self.randomness = torch.get_rng_state()
        return result

    def start_from_rank_0(self) -> None:
        """Give all ranks rank 0's weights and buffers."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def prepare(self) -> None:
        """Whatever must follow changes before a call."""

    def state(self) -> dict[str, Any]:
        """All parameters, gradients, buffers and optimizer states, by name."""
        found: dict[str, Any] = {}
        names = {param: name for name, param in self.module.named_parameters()}
        for param, name in names.items():
            found[name], found[f"gradient of {name}"] = param, param.grad
        found |= {f"buffer {name}": buffer for name, buffer in self.module.named_buffers()}
        held = [param for group in self.optimizer.param_groups for param in group["params"]]
        names |= {param: f"parameter {i}" for i, param in enumerate(held) if param not in names}
        for key, values in self.optimizer.state.items():
            found |= {f"{name} of {names.get(key, key)}": value for name, value in values.items()}
        return found


class TransparentDDP(DistributedDataParallel):
    """DDP that a step can use like the plain module: its attributes and names are those of the module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


_OF_THE_MODULE = ("parameters", "named_parameters", "modules", "state_dict", "load_state_dict", "apply")


class DDPTraining(Training):
    """The reference: the eager step, with the model in DDP."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        super().__init__(recipe, rank)
        self.start_from_rank_0()
        self.structure: Any = None

    def prepare(self) -> None:
        # DDP does not see a layer that was replaced or frozen: wrap the changed module again, as a user would.
        structure = [(id(param), param.requires_grad) for param in self.module.parameters()]
        if structure != self.structure:
            self.structure = structure
            self.model = TransparentDDP(self.module, find_unused_parameters=True)
            for name in _OF_THE_MODULE:
                object.__setattr__(self.model, name, getattr(self.module, name))
        self.model.training = self.module.training  # the program may have changed that of the module only


class AveragedTraining(Training):
    """The reference for programs with several backwards of one forward, of which DDP averages only the first.

    Each gradient is averaged whenever something was added to it.
    """

    def __init__(self, recipe: Recipe, rank: int) -> None:
        super().__init__(recipe, rank)
        self.hooked: set[torch.Tensor] = set()
        self.start_from_rank_0()

    def prepare(self) -> None:
        for buffer in self.module.buffers():  # as DDP does
            dist.broadcast(buffer, 0)
        for param in self.module.parameters():
            if param.requires_grad and param not in self.hooked:
                self.hooked.add(param)
                param.register_post_accumulate_grad_hook(_average)


def _average(param: torch.Tensor) -> None:
    assert param.grad is not None
    mean = param.grad.to_dense().contiguous() / dist.get_world_size()
    dist.all_reduce(mean)
    param.grad = mean.to_sparse(param.grad.sparse_dim()) if param.grad.is_sparse else mean


def recorded(value: Any) -> Any:
    """A copy of tensors and containers, which later calls do not change. DTensors become whole, on all ranks."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, _copy, value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to_dense().clone()


def _record(training: Training, result: Any) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """What one call of a training left behind."""
    return recorded(result), recorded(training.state()), training.randomness


def difference(mine: Any, theirs: Any) -> str | None:
    """How two recorded values differ, if they do."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"is {_kind(mine)} instead of {_kind(theirs)}"
        if not torch.allclose(mine, theirs, TOLERANCE, TOLERANCE, equal_nan=True):
            return f"differs by {(mine.double() - theirs.double()).abs().max().item():.2g}"
        return None
    if isinstance(mine, float) and isinstance(theirs, float):
        return None if abs(mine - theirs) <= TOLERANCE * (1 + abs(theirs)) or mine != mine else f"{mine}, not {theirs}"
    return None if type(mine) is type(theirs) and mine == theirs else f"is {_kind(mine)} instead of {_kind(theirs)}"


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def first_difference(mine: Any, theirs: Any) -> str | None:
    """The first difference between what two calls left behind."""
    pairs = [torch.utils._pytree.tree_flatten(record[0]) for record in (mine, theirs)]
    if pairs[0][1] != pairs[1][1]:
        return f"the result has another structure: {pairs[0][1]} instead of {pairs[1][1]}"
    for number, pair in enumerate(zip(pairs[0][0], pairs[1][0], strict=True)):
        if found := difference(*pair):
            return f"result {number} {found}"
    if missing := mine[1].keys() ^ theirs[1].keys():
        return f"only one of them has {sorted(missing)}"
    for name, value in mine[1].items():
        if found := difference(value, theirs[1][name]):
            return f"{name} {found}"
    return None if torch.equal(mine[2], theirs[2]) else "torch's random generator is in another state"


_status_groups: Any = weakref.WeakKeyDictionary()


def check(recipe: Recipe) -> TrainingOutcome:
    """Run a program eagerly and compiled, in all ranks. The outcome is that of all ranks."""
    torch.set_default_dtype(torch.float64)
    world = dist.group.WORLD
    if world not in _status_groups:
        _status_groups[world] = dist.new_group(timeout=TIMEOUT)
    return _Check(recipe, _status_groups[world]).run()


class _Check:
    """The two runs of a program in one rank. The ranks tell each other their outcomes after each call."""

    def __init__(self, recipe: Recipe, group: Any) -> None:
        self.recipe, self.group, self.rank = recipe, group, dist.get_rank()

    def run(self) -> TrainingOutcome:
        kind = reference_of(self.recipe)
        truth: list[Any] = []
        training = None
        for number in range(len(self.recipe.sizes)):
            mine = TrainingOutcome(RIGHT)
            try:
                training = training or kind(self.recipe, self.rank)
                truth.append(_record(training, training.call(number)))
            except Exception as error:
                mine = TrainingOutcome(INVALID, number, f"{type(error).__name__}: {error}")
            if bad := [each for each in self._of_all(mine) if each.kind != RIGHT]:
                return bad[0]
        return self._compiled(truth)

    def _of_all(self, mine: TrainingOutcome) -> list[TrainingOutcome]:
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, mine, group=self.group)
        return outcomes

    def _compiled(self, truth: list[Any]) -> TrainingOutcome:
        training = Training(self.recipe, self.rank)
        step = compile(parallel_mode=DataParallel(self.recipe.style, bucket_mb=self.recipe.bucket_mb))(training.step)
        for number, expected in enumerate(truth):
            result, mine = self._call(training, step, number)
            try:
                ended = self._joint(self._of_all(mine))
                if ended is None:
                    found = first_difference(_record(training, result), expected)
                    mine = TrainingOutcome(WRONG if found else RIGHT, number, found or "")
                    ended = self._joint(self._of_all(mine))
            except RuntimeError as error:
                return TrainingOutcome(HANG, number, f"this rank: {mine}; the others did not arrive ({error})"[:600])
            if ended is not None:
                return ended
        return TrainingOutcome(RIGHT, len(truth))

    def _call(self, training: Training, step: Any, number: int) -> tuple[Any, TrainingOutcome]:
        try:
            return training.call(number, step), TrainingOutcome(RIGHT, number)
        except (SPMDError, Refused) as error:
            return None, TrainingOutcome(REFUSED, number, str(error))
        except Exception as error:
            return None, TrainingOutcome(ERROR, number, f"{type(error).__name__}: {error}"[:1500])

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


def reference_of(recipe: Recipe) -> type[Training]:
    """The training that tells the truth of a program: DDP, unless it has several backwards of one forward."""
    return AveragedTraining if recipe.source().count(".backward(") > 1 else DDPTraining
