"""FSDP2 around tensor parallelism trains like one model on one device, and communicates no more than it must."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_testing_ext.common_distributed import at_least_x_gpu
from torch_testing_ext.common_fsdp import FSDPTest
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.layouts import Layout, check_layouts

WIDTH = 8
STEPS = 3
DP, TP = 2, 2

TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}
# Activations between blocks are sharded over the batch: each rank of a tensor-parallel group normalises its own rows.
SEQUENCE_PARALLEL = {
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
}

# In one forward and backward of two blocks, FSDP gathers each block twice and reduces its gradients once.
FSDP_COLLECTIVES = {"_allgather_base_": 4, "_reduce_scatter_base_": 2}
# The first block's input needs no gradient, so the backward runs one collective less than the forward. The all-reduces
# of sequence parallelism sum the gradients of the two norms, which each rank applies to other rows.
TP_COLLECTIVES = {
    "tensor_parallel": {"all_reduce": 3},
    "sequence_parallel": {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 3, "all_reduce": 4},
}


class Block(nn.Module):
    """A feed-forward layer with a residual connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x).relu()))


def plain_model(device_type: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device_type)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict, reshard_after_forward: bool = True) -> nn.Module:
    for block in model:
        parallelize_module(block, mesh["tp"], dict(plan))
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)


def batch_of(step: int) -> torch.Tensor:
    return torch.rand(4 * DP, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    # A sum, so that ranks can compute it from parts of the rows; not linear, or LayerNorm has no gradient.
    return output.pow(3).sum()


class OnMesh:
    """The needs of these tests."""

    @property
    def world_size(self) -> int:
        return DP * TP

    @property
    def device_type(self) -> str:
        """The CPU beside 1 to 3 accelerators, too."""
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None and at_least_x_gpu(self.world_size) else "cpu"


class TestFullyShardTPTraining(OnMesh, TestCase):
    def train(self, layout: Layout, device_type: str, is_sequence_parallel: bool, reshard_after_forward: bool) -> None:
        # Making it chooses the device of the rank.
        mesh = layout.mesh if layout.size("dp") > 1 else None
        model = layout.load(plain_model(device_type))
        if mesh is not None:
            plan = SEQUENCE_PARALLEL if is_sequence_parallel else TENSOR_PARALLEL
            parallelize(model, mesh, plan, reshard_after_forward)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for batch in layout.batches(batch_of, STEPS):
            loss = loss_of(model(batch.to(device_type)))
            # FSDP averages gradients over the ranks of dp.
            (loss / DP if mesh is None else loss).backward()
            layout.step(model, optimizer, loss / DP)

    @parametrize("is_sequence_parallel", [False, True])
    @parametrize("reshard_after_forward", [True, False])
    def test_fully_shard_tp_matches_single_device(self, is_sequence_parallel, reshard_after_forward):
        """With sequence parallelism, the ranks of a tensor-parallel group share the rows of a batch, too."""
        data = ("dp", "tp") if is_sequence_parallel else ("dp",)
        device_type = self.device_type
        train = functools.partial(
            self.train,
            device_type=device_type,
            is_sequence_parallel=is_sequence_parallel,
            reshard_after_forward=reshard_after_forward,
        )
        devices = 0 if device_type == "cpu" else self.world_size
        check_layouts(train, f"dp={DP} tp={TP}", data=data, devices=devices, strict=True)


class TestFullyShardTPIntegration(OnMesh, FSDPTest):
    def test_fully_shard_tp_collectives(self):
        self.run_subtests({"style": ["tensor_parallel", "sequence_parallel"]}, self._test_collectives)

    def _test_collectives(self, style: str) -> None:
        plan = SEQUENCE_PARALLEL if style == "sequence_parallel" else TENSOR_PARALLEL
        mesh = init_device_mesh(self.device_type, (DP, TP), mesh_dim_names=("dp", "tp"))
        model = parallelize(plain_model(self.device_type), mesh, plan)
        rows = batch_of(0)[:4].to(self.device_type)
        with CommDebugMode() as comm:
            loss_of(model(rows)).backward()
        counts = {op.__name__: count for op, count in comm.get_comm_counts().items()}
        self.assertEqual(counts, {**FSDP_COLLECTIVES, **TP_COLLECTIVES[style]})


instantiate_parametrized_tests(TestFullyShardTPTraining)

if __name__ == "__main__":
    run_tests()
