"""How a step is spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import fx
from torch.distributed.tensor import DTensor, Shard

from .errors import SPMDError
from .layout import Layout
from .lower.buckets import Wire
from .lower.lowering import LoweredProgram, lower
from .trace.state import StateEntry, StepState
from .trace.tracing import Traced

Style = Literal["replicate", "fully_shard", "default"]


class ParallelMode(ABC):
    """What `compile` asks of a way to parallelize: how parameters lie, and the program that works on them."""

    batch_dim: int = 0

    @abstractmethod
    def layouts(self, state: StepState, rank: int, world: int) -> list[Layout]:
        """How each parameter of `state` shall lie on the ranks."""

    @abstractmethod
    def partition(
        self, traced: Traced, state: StepState, entries: list[StateEntry], group: str, world: int, compiled: bool
    ) -> LoweredProgram:
        """The program of every rank, collectives included, from the traced local one."""

    def transform(self, module: fx.GraphModule) -> fx.GraphModule:
        """A last word on the graph, before it is made executable."""
        return module


class DataParallel(ParallelMode):
    """Data parallelism: every rank takes its own batch; the update is that of the mean gradient.

    parallel_style: "replicate" keeps whole parameters on every rank (as DDP does), "fully_shard" cuts parameters,
        gradients and optimizer states along dim 0 (as FSDP does). "default" keeps what the parameters already are,
        if an earlier compiled step distributed them, and replicates them otherwise.
    input_batch_dim: the dim of the inputs that counts examples. Its size may change from call to call, and differ
        between ranks, without tracing again (0 and 1 are special: each is traced by itself).
    custom_passes: called with the final graph module, changes it in place or returns another.
    bucket_mb: the largest collective, in MiB of gradients or parameters.
    reshard_after_forward: with "fully_shard", gather parameters again for backward instead of keeping them whole.
    """

    def __init__(
        self,
        parallel_style: Style = "replicate",
        *,
        input_batch_dim: int = 0,
        custom_passes: Callable[[fx.GraphModule], fx.GraphModule | None] | None = None,
        bucket_mb: float = 25.0,
        reshard_after_forward: bool = False,
    ) -> None:
        if parallel_style not in get_args(Style):
            raise SPMDError(
                f"Unknown parallel_style {parallel_style!r}.",
                remedy=f"Use one of {', '.join(map(repr, get_args(Style)))}.",
            )
        if not isinstance(input_batch_dim, int) or isinstance(input_batch_dim, bool) or input_batch_dim < 0:
            raise SPMDError(
                f"input_batch_dim is {input_batch_dim!r}.", remedy="Pass the number of a dim, counted from 0."
            )
        if bucket_mb <= 0:
            raise SPMDError(f"bucket_mb is {bucket_mb}.", remedy="Pass a positive size in MiB.")
        self.parallel_style = parallel_style
        self.batch_dim = input_batch_dim
        self.custom_passes = custom_passes
        self.bucket_bytes = int(bucket_mb * 1024 * 1024)
        self.reshard_after_forward = reshard_after_forward

    def layouts(self, state: StepState, rank: int, world: int) -> list[Layout]:
        return [self._layout(held.name, held.value, rank, world) for held in state.params]

    def _layout(self, name: str, param: torch.Tensor, rank: int, world: int) -> Layout:
        sharded = self.parallel_style == "fully_shard" and param.dim() > 0
        if isinstance(param, DTensor):
            is_sharded = isinstance(param.placements[0], Shard)
            if param.device_mesh.ndim != 1 or param.device_mesh.size() != world or param.placements[0].is_partial():
                raise SPMDError(
                    f"Parameter {name} is a DTensor over {param.device_mesh}, placed {param.placements}.",
                    remedy="Pass a plain module, or one distributed by an earlier compiled step of the same ranks.",
                )
            if self.parallel_style != "default" and is_sharded != sharded:
                raise SPMDError(
                    f"Parameter {name} is already distributed, as {param.placements[0]}, by another compiled step.",
                    remedy='Use the same parallel_style in both steps, or parallel_style="default" in the second.',
                )
            sharded = is_sharded
        return Layout(torch.Size(param.shape), sharded, rank, world)

    def partition(
        self, traced: Traced, state: StepState, entries: list[StateEntry], group: str, world: int, compiled: bool
    ) -> LoweredProgram:
        return lower(
            traced, state, entries, Wire(group, world, self.bucket_bytes, compiled), self.reshard_after_forward
        )

    def transform(self, module: fx.GraphModule) -> fx.GraphModule:
        changed = self.custom_passes(module) if self.custom_passes is not None else None
        return module if changed is None else changed
