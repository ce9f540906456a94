"""The models of the FSDP2 tests: plain modules that a test shards itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_testing_ext._torch import fsdp_parts


class MLP(nn.Module):
    """Linear layers dim -> dim_multiplier * dim -> dim, each with ReLU; with `with_buffer`, adds a random buffer."""

    def __init__(
        self,
        dim: int,
        device: torch.device | None = None,
        *,
        bias: bool = True,
        with_buffer: bool = False,
        dim_multiplier: int = 4,
    ):
        """Create the layers on a device."""
        super().__init__()
        hidden = dim_multiplier * dim
        self.in_proj = nn.Linear(dim, hidden, device=device, bias=bias)
        self.out_proj = nn.Linear(hidden, dim, device=device, bias=bias)
        self.buffer: torch.Tensor | None
        if with_buffer:
            self.register_buffer("buffer", torch.randn((dim,), device=device))
        else:
            self.buffer = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(self.in_proj(x).relu()).relu()
        return out if self.buffer is None else out + self.buffer

    def reset_parameters(self) -> None:
        if self.buffer is not None:
            nn.init.normal_(self.buffer)


class MLPStack(nn.Sequential):
    """Three MLPs, the outer two of a width (3 * dim) that does not divide evenly; optionally, a LayerNorm."""

    def __init__(self, mlp_dim: int, *, with_seq_parallel: bool = False):
        layers: list[nn.Module] = [MLP(mlp_dim, dim_multiplier=3), MLP(mlp_dim), MLP(mlp_dim, dim_multiplier=3)]
        if with_seq_parallel:
            layers.append(nn.LayerNorm(mlp_dim, bias=False))
        super().__init__(*layers)
        self.with_seq_parallel = with_seq_parallel

    def parallelize(
        self, tp_mesh: DeviceMesh, dp_mesh: DeviceMesh, use_activation_checkpointing: bool, **fsdp_kwargs: Any
    ) -> MLPStack:
        """Apply tensor parallelism over `tp_mesh`, then `fully_shard` over `dp_mesh` to each MLP and to the whole."""
        parallelize_module(self, device_mesh=tp_mesh, parallelize_plan=self._plan())
        for module in self:
            if isinstance(module, nn.LayerNorm):
                continue
            if use_activation_checkpointing:
                fsdp_parts.checkpoint_activations(module)
            fully_shard(module, mesh=dp_mesh, **fsdp_kwargs)
        fully_shard(self, mesh=dp_mesh, **fsdp_kwargs)
        return self

    def _plan(self) -> dict[str, ParallelStyle]:
        # Activations between the layers stay DTensors: as plain tensors, uneven shards would lose their true sizes.
        plan: dict[str, ParallelStyle] = {}
        for index in range(3):
            plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
            plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
        plan["2.out_proj"] = RowwiseParallel(output_layouts=Shard(1)) if self.with_seq_parallel else RowwiseParallel()
        if self.with_seq_parallel:
            plan["3"] = SequenceParallel(sequence_dim=1)
        return plan


class DoubleLinear(nn.Module):
    """Two parallel linear layers: two outputs, or (`use_second_linear=False`) one output and an unused layer."""

    def __init__(self, dim: int, use_second_linear: bool = True):
        super().__init__()
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.relu = nn.ReLU()
        self.use_second_linear = use_second_linear

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        first = self.relu(self.lin1(x))
        return (first, self.relu(self.lin2(x))) if self.use_second_linear else first
