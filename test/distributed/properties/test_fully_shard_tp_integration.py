"""FSDP2 around tensor parallelism trains like FSDP1 around tensor parallelism, and like one model on one device.

The ranks of a tensor-parallel group share a batch. The single model trains on all batches, with the mean of the losses.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_testing_ext.common_distributed import at_least_x_gpu
from torch_testing_ext.common_fsdp import FSDPTest
from torch_testing_ext.common_utils import run_tests

WIDTH = 8
STEPS = 3

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


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TestFullyShardTPIntegration(FSDPTest):
    @property
    def world_size(self) -> int:
        return 4

    @property
    def device_type(self) -> str:
        """The CPU beside 1 to 3 accelerators, too."""
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None and at_least_x_gpu(4) else "cpu"

    @property
    def device(self) -> torch.device:
        on_cpu = self.device_type == "cpu"
        return torch.device(self.device_type, None if on_cpu else torch.accelerator.current_device_index())

    def mesh_2d(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("dp", "tp"))

    def plain_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block()).to(self.device)

    def tp_model(self, mesh: DeviceMesh, plan: dict) -> nn.Module:
        model = self.plain_model()
        for block in model:
            parallelize_module(block, mesh["tp"], dict(plan))
        return model

    def fsdp2_model(self, mesh: DeviceMesh, plan: dict, reshard_after_forward: bool = True) -> nn.Module:
        model = self.tp_model(mesh, plan)
        for block in model:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
        return fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)

    def fsdp1_model(self, mesh: DeviceMesh, plan: dict) -> FSDP:
        return FSDP(
            self.tp_model(mesh, plan),
            device_mesh=mesh["dp"],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=self.device,
        )

    def batch(self, step: int, dp_rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + dp_rank)
        return torch.rand(4, WIDTH, generator=generator).to(self.device)

    def test_fully_shard_tp_matches_fsdp1_tp_and_single_device(self):
        self.run_subtests(
            {"sequence_parallel": [False, True], "reshard_after_forward": [True, False]}, self._test_parity
        )

    def _test_parity(self, sequence_parallel: bool, reshard_after_forward: bool) -> None:
        mesh = self.mesh_2d()
        plan = SEQUENCE_PARALLEL if sequence_parallel else TENSOR_PARALLEL
        single = self.plain_model()
        fsdp1, fsdp2 = self.fsdp1_model(mesh, plan), self.fsdp2_model(mesh, plan, reshard_after_forward)
        models = (single, fsdp1, fsdp2)
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
        dp_rank, tp_rank = mesh.get_coordinate()

        def mine(rows: torch.Tensor) -> torch.Tensor:
            return rows.chunk(2)[tp_rank] if sequence_parallel else rows

        for step in range(STEPS):
            batches = [self.batch(step, other) for other in range(mesh.size(0))]
            expected = [single(batch) for batch in batches]
            torch.stack([self.loss(output) for output in expected]).mean().backward()

            for name, model in (("FSDP1", fsdp1), ("FSDP2", fsdp2)):
                output = model(mine(batches[dp_rank]))
                self.assertEqual(mine(expected[dp_rank]), output, msg=f"{name} output, step {step}, rank {self.rank}")
                self.loss(output).backward()
            self._check_grads(single, fsdp1, fsdp2, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self._check_params(single, fsdp1, fsdp2, step)

    @staticmethod
    def loss(output: torch.Tensor) -> torch.Tensor:
        # A sum, so that ranks can compute it from parts of the rows; not linear, or LayerNorm has no gradient.
        return output.pow(3).sum()

    def _check_grads(self, single: nn.Module, fsdp1: FSDP, fsdp2: nn.Module, step: int) -> None:
        with FSDP.summon_full_params(fsdp1, with_grads=True):
            of_fsdp1 = {name: full(param.grad) for name, param in fsdp1.named_parameters()}
        of_fsdp2 = {name: full(param.grad) for name, param in fsdp2.named_parameters()}
        for name, param in single.named_parameters():
            self.assertEqual(param.grad, of_fsdp2[name], msg=f"FSDP2 gradient of {name}, step {step}")
            self.assertEqual(param.grad, of_fsdp1[name], msg=f"FSDP1 gradient of {name}, step {step}")

    def _check_params(self, single: nn.Module, fsdp1: FSDP, fsdp2: nn.Module, step: int) -> None:
        with FSDP.summon_full_params(fsdp1):
            of_fsdp1 = {name: full(param).detach().clone() for name, param in fsdp1.named_parameters()}
        of_fsdp2 = {name: full(param) for name, param in fsdp2.named_parameters()}
        for name, param in single.named_parameters():
            self.assertEqual(param, of_fsdp2[name], msg=f"FSDP2 {name} after step {step}")
            self.assertEqual(param, of_fsdp1[name], msg=f"FSDP1 {name} after step {step}")

    def test_fully_shard_tp_collectives(self):
        self.run_subtests({"style": ["tensor_parallel", "sequence_parallel"]}, self._test_collectives)

    def _test_collectives(self, style: str) -> None:
        plan = SEQUENCE_PARALLEL if style == "sequence_parallel" else TENSOR_PARALLEL
        model = self.fsdp2_model(self.mesh_2d(), plan)
        with CommDebugMode() as comm:
            self.loss(model(self.batch(0, 0))).backward()
        counts = {op.__name__: count for op, count in comm.get_comm_counts().items()}
        self.assertEqual(counts, {**FSDP_COLLECTIVES, **TP_COLLECTIVES[style]})


if __name__ == "__main__":
    run_tests()
