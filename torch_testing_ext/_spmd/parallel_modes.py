"""The parts that all of the compiler needs: the user's choices, the layout of a parameter, its errors."""

import math
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

# --------------------------------------------------------------------------------------------------------------------
# The layout of a parameter over ranks: whole on each rank, or sharded along dim 0 as by DTensor's Shard(0).


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter, from the point of view of one rank."""

    shape: torch.Size
    sharded: bool
    rank: int
    world: int

    @property
    def placement(self) -> Placement:
        return Shard(0) if self.sharded else Replicate()

    @property
    def chunk(self) -> int:
        """The number of rows of a full shard. The last ranks may have fewer rows, or none."""
        return -(-self.shape[0] // self.world)

    @property
    def even(self) -> bool:
        """Do all shards have the same number of rows?"""
        return self.shape[0] % self.world == 0

    @property
    def rows(self) -> tuple[int, int]:
        """This rank's rows: the first, and the one after the last."""
        return self.rows_of(self.rank)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The rows of a rank: the first, and the one after the last."""
        chunk = self.chunk
        start = min(rank * chunk, self.shape[0])
        return start, min(start + chunk, self.shape[0])

    @property
    def local_shape(self) -> torch.Size:
        if not self.sharded:
            return self.shape
        start, end = self.rows
        return torch.Size((end - start, *self.shape[1:]))

    @property
    def padded_numel(self) -> int:
        """The number of elements per rank in a collective, which needs parts of equal size."""
        return self.chunk * math.prod(self.shape[1:])

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: the tensor itself if replicated, else a copy of its rows."""
        if not self.sharded:
            return whole
        start, end = self.rows
        return whole[start:end].clone(memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------------------------------------------------
# `SPMDError`, and the search for the line of user code that caused it.

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class SPMDError(ValueError):
    """The step, model or optimizer cannot be made data parallel. Model and optimizer are unchanged.

    `what` is the problem, `where` the line of user code that caused it ("file:line, in function: code"), and `remedy`
    says how to fix it.
    """

    def __init__(self, what: str, *, remedy: str, where: str | None = None) -> None:
        self.what, self.remedy, self.where = what, remedy, where
        super().__init__("\n".join(filter(None, [what, where and f"  at {where}", f"  {remedy}"])))


def check_choice(title: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise an error if `value` is none of `choices`."""
    if value not in choices:
        raise SPMDError(f"Unknown {title} {value!r}.", remedy=f"Use one of {', '.join(map(repr, choices))}.")


def user_line_of(error: BaseException) -> str | None:
    """The innermost line of user code in the traceback of `error`."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_user_file(entry.filename):
            return f"{entry.filename}:{entry.lineno}, in {entry.name}: {entry.line}"
    return None


def raised_by_user(error: BaseException) -> bool:
    """Has code of the step, and not of torch, raised `error`?"""
    entries = traceback.extract_tb(error.__traceback__)
    return bool(entries) and _is_user_file(entries[-1].filename)


def _is_user_file(filename: str) -> bool:
    return not filename.startswith((_TORCH, _PACKAGE, "<"))


# --------------------------------------------------------------------------------------------------------------------
# The choices of a user: how a step is distributed over ranks, and the modules that a recording replaces.

DataParallelStyle = Literal["replicate", "fully_shard", "default"]
Between = Literal["plain", "dtensor"]
GraphPass = Callable[[fx.GraphModule], "fx.GraphModule | None"]


class ParallelMode:
    """A way to parallelize a step."""


class DataParallel(ParallelMode):
    """Data parallelism: every rank takes its own batch, and the update applies the mean gradient over ranks.

    parallel_style: "replicate" keeps whole parameters on every rank (like DDP), "fully_shard" shards parameters,
        gradients and optimizer states along dim 0 (like FSDP). "default" keeps the layout of parameters that an
        earlier compiled step distributed, and replicates them otherwise.
    input_batch_dim: the batch dimension of the inputs, as in PyTorch's compiler. This one need not know it.
    custom_passes: called with the graph module of a captured step; changes it in place or returns another.
    bucket_mb: the size limit of a bucket, in MiB of gradients or parameters. None chooses it by their total.
    between: the form of replicated parameters between calls: "plain" tensors, the default, or a "dtensor" on the same
        memory, the default under the names that PyTorch's compiler had. Sharded parameters are DTensors in any case.
    """

    def __init__(
        self,
        parallel_style: DataParallelStyle = "replicate",
        *,
        input_batch_dim: int = 0,
        custom_passes: GraphPass | None = None,
        bucket_mb: float | None = None,
        between: Between | None = None,
    ) -> None:
        check_choice("parallel_style", parallel_style, get_args(DataParallelStyle))
        check_choice("between", between, (*get_args(Between), None))
        if not isinstance(input_batch_dim, int) or isinstance(input_batch_dim, bool) or input_batch_dim < 0:
            raise SPMDError(f"input_batch_dim is {input_batch_dim!r}.", remedy="Pass a dimension, counted from 0.")
        if bucket_mb is not None and bucket_mb <= 0:
            raise SPMDError(f"bucket_mb is {bucket_mb}.", remedy="Pass a positive size in MiB.")
        self.parallel_style, self.custom_passes, self.between = parallel_style, custom_passes, between
        self.bucket_bytes = None if bucket_mb is None else int(bucket_mb * 1024 * 1024)

    def layout_of(self, name: str, param: torch.Tensor, rank: int, world: int) -> Layout:
        """The layout of a parameter. Raises an error for a DTensor that it cannot be."""
        sharded = self.parallel_style == "fully_shard" and param.dim() > 0 and param.numel() > 0
        if isinstance(param, DTensor):
            is_sharded = param.placements[0] == Shard(0)
            is_known = is_sharded or param.placements[0].is_replicate()
            if param.device_mesh.ndim != 1 or param.device_mesh.size() != world or not is_known:
                raise SPMDError(
                    f"Parameter {name} is a DTensor on {param.device_mesh} with placements {param.placements}.",
                    remedy="Pass a plain module, or one that an earlier compiled step distributed over the same ranks.",
                )
            if self.parallel_style != "default" and is_sharded != sharded:
                raise SPMDError(
                    f"Parameter {name} is already distributed as {param.placements[0]}, by another compiled step.",
                    remedy='Use the same parallel_style in both steps, or parallel_style="default" in the second.',
                )
            sharded = is_sharded
        return Layout(torch.Size(param.shape), sharded, rank, world)


class Override(ABC):
    """Replaces submodules while a step is recorded, and may change the resulting graph."""

    @abstractmethod
    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The module to run instead of `orig_submodule`, or `orig_submodule` itself to keep it.

        A replacement uses the original's parameters (it may hold the original) and has none of its own.
        """

    @abstractmethod
    def transform(self, gm: fx.GraphModule, flat_state: list[torch.Tensor]) -> fx.GraphModule:
        """Return the final graph, changed or not.

        `flat_state` holds this rank's parameters in the order of the graph's inputs.
        """


def replace_submodules(overrides: Iterable[Override], roots: list[nn.Module]) -> None:
    """Install the replacements. Whoever calls this restores the modules."""
    for number, root in enumerate(roots):
        for prefix, parent in list(root.named_modules(prefix="" if len(roots) == 1 else str(number))):
            for name, child in list(parent._modules.items()):
                replaced = child
                for override in overrides:
                    if replaced is not None:
                        replaced = override.replacement(f"{prefix}.{name}" if prefix else name, replaced)
                parent._modules[name] = replaced
