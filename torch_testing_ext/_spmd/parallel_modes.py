"""The choices of a user: how a step is distributed over ranks, and the modules that a recording replaces."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard

from .param_layout import Layout
from .spmd_errors import SPMDError, check_choice

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
