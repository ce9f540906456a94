# Owner(s): ["oncall: distributed"]
"""FSDP1 around tensor parallelism trains like FSDP alone, with the expected communication, and syncs module states.

On the CPU, the tests pass `device_id` to FSDP1, which would look for an accelerator otherwise.
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, ShardingStrategy, _init_utils
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_testing_ext.common_distributed import at_least_x_gpu
from torch_testing_ext.common_fsdp import FSDPTest
from torch_testing_ext.common_utils import TEST_WITH_DEV_DBG_ASAN, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import MLPModule, RMSNormPython

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

if TEST_WITH_DEV_DBG_ASAN:
    print("Skip dev-asan as torch + multiprocessing spawn have known issues", file=sys.stderr)
    sys.exit(0)

TP_SIZE = 2

# The collectives of one forward and backward, without the two of FSDP itself.
TP_COLLECTIVES = {"reduce_scatter_tensor": 2, "all_gather_into_tensor": 2, "all_reduce": 1}
# FSDP gathers a list of tensors on the CPU, and else one tensor, over gloo, too.
FSDP_GATHERS = {"cpu": {"allgather_": 1}, "other": {"_allgather_base_": 1}}


class SimpleModel(nn.Module):
    """Three linear layers, of which tensor parallelism shards the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(5, 8)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(8, 4)
        self.net3 = nn.Linear(4, 12)

    def forward(self, x):
        return self.net3(self.net2(self.relu(self.net1(x))))


# The dimensions in which the plan shards SimpleModel's parameters; the others are not sharded.
SHARD_DIMS = {"net1.weight": 0, "net1.bias": 0, "net2.weight": 1}
SEQUENCE_PARALLEL_PLAN = {
    "net1": ColwiseParallel(input_layouts=Shard(0)),
    "net2": RowwiseParallel(output_layouts=Shard(0)),
}


class NormedMLP(nn.Module):
    """An MLP whose input is normalised."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.mlp = MLPModule(device)
        self.mlp_norm = RMSNormPython(10).to(device)

    def forward(self, x):
        return self.mlp(self.mlp_norm(x))


class ReplicatedState(nn.Module):
    """One parameter and one buffer, both replicated over tensor-parallel ranks."""

    def __init__(self, tp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.param = nn.Parameter(self._replicated(tp_mesh))
        self.buf = nn.Buffer(self._replicated(tp_mesh))

    @staticmethod
    def _replicated(mesh: DeviceMesh) -> DTensor:
        values = torch.randn(8, 8, device=mesh.device_type)
        return DTensor.from_local(values, mesh, [Replicate()], run_check=False)


class TestTPFSDPIntegration(FSDPTest):
    @property
    def world_size(self) -> int:
        """A rank for each accelerator, 4 on the CPU; an even number, for the mesh."""
        return max(4, super().world_size // TP_SIZE * TP_SIZE)

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
        shape = (self.world_size // TP_SIZE, TP_SIZE)
        return init_device_mesh(self.device_type, shape, mesh_dim_names=("dp", "tp"))

    def test_fsdp_tp_integration(self):
        self._test_all_strategies(CPUOffload(offload_params=False))

    def test_fsdp_tp_integration_cpu_offload(self):
        if self.device_type == "cpu":
            self.skipTest("FSDP1 pins the memory of offloaded parameters, which takes an accelerator")
        self._test_all_strategies(CPUOffload(offload_params=True))

    def _test_all_strategies(self, cpu_offload: CPUOffload) -> None:
        self.run_subtests(
            {"sharding_strategy": [None, ShardingStrategy.SHARD_GRAD_OP], "use_orig_params": [False, True]},
            self._test_fsdp_tp_integration,
            cpu_offload=cpu_offload,
        )

    def _test_fsdp_tp_integration(self, **fsdp_options) -> None:
        """Compare with FSDP alone over all ranks.

        With sequence parallelism, each tensor-parallel rank's input is a part of the batch, so both train on the same
        batch and must compute the same numbers.
        """
        torch.manual_seed(0)
        model = SimpleModel().to(self.device)
        tp_model = copy.deepcopy(model)
        torch.manual_seed(self.rank + 1)
        batch = torch.rand(2, 3, 5, device=self.device)

        fsdp_options["device_id"] = self.device
        fsdp_model = FSDP(model, device_mesh=init_device_mesh(self.device_type, (self.world_size,)), **fsdp_options)
        mesh = self.mesh_2d()
        parallelize_module(tp_model, mesh["tp"], SEQUENCE_PARALLEL_PLAN)
        for layer in (tp_model.net1, tp_model.net2):
            self.assertIsInstance(layer.weight, DTensor)
        tp_fsdp_model = FSDP(tp_model, device_mesh=mesh["dp"], **fsdp_options)

        output, tp_output = fsdp_model(batch), tp_fsdp_model(batch)
        self.assertEqual(output, tp_output, msg=f"output of rank {self.rank}")
        output.sum().backward()
        tp_output.sum().backward()
        numels = {name: param.numel() for name, param in SimpleModel().named_parameters()}
        tp_numels = {name: n // TP_SIZE if name in SHARD_DIMS else n for name, n in numels.items()}
        self._sync_tp_grads(tp_fsdp_model, mesh, tp_numels)
        grads = self._get_grads(fsdp_model, self.process_group, numels)
        tp_grads = self._get_grads(tp_fsdp_model, mesh.get_group("dp"), tp_numels)
        for name, expected in grads.items():
            actual = self._joined_over_tp(name, tp_grads[name], mesh)
            self.assertEqual(expected, actual, msg=f"gradient of {name} on rank {self.rank}")

        for trained in (fsdp_model, tp_fsdp_model):
            torch.optim.SGD(trained.parameters(), lr=3e-5).step()
        torch.manual_seed(self.rank + 16)
        batch = torch.rand(2, 3, 5, device=self.device)
        self.assertEqual(fsdp_model(batch), tp_fsdp_model(batch), msg=f"second output of rank {self.rank}")

    def _sync_tp_grads(self, model: FSDP, mesh: DeviceMesh, numels: dict[str, int]) -> None:
        """Average the gradients over tp, in place; FSDP has averaged them over dp.

        DTensor has summed the gradients of the layers in the plan over tp. Those of net3, which is not in the plan,
        still differ between ranks.
        """
        unsummed = torch.cat([torch.full((n,), name.startswith("net3")) for name, n in numels.items()])
        unsummed_shard = unsummed.chunk(mesh.size(0))[mesh.get_local_rank("dp")].to(self.device)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads]).to(self.device)
        summed = flat.clone()
        dist.all_reduce(summed, group=mesh.get_group("tp"))
        averaged = torch.where(unsummed_shard, summed, flat) / TP_SIZE
        for grad, part in zip(grads, averaged.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _get_grads(self, model: FSDP, group: dist.ProcessGroup, numels: dict[str, int]) -> dict[str, torch.Tensor]:
        """Each parameter's flattened gradient, gathered from the shards that FSDP left on the ranks of `group`."""
        grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        shard = torch.cat(grads).to(self.device)
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard, group=group)
        return dict(zip(numels, torch.cat(shards).split(list(numels.values())), strict=True))

    def _joined_over_tp(self, name: str, grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if name not in SHARD_DIMS:
            return grad
        dim = SHARD_DIMS[name]
        shape = list(SimpleModel().get_parameter(name).shape)
        shape[dim] //= TP_SIZE
        whole = DTensor.from_local(grad.view(shape), mesh["tp"], [Shard(dim)]).full_tensor()
        return whole.flatten()

    def test_fsdp_tp_extension_grad(self):
        mesh = self.mesh_2d()
        model = NormedMLP(self.device_type)
        plan = {f"mlp.{name}": style for name, style in SEQUENCE_PARALLEL_PLAN.items()}
        parallelize_module(model, mesh["tp"], plan)
        distribute_module(
            model.mlp_norm,
            mesh["tp"],
            input_fn=lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Shard(0)]),
            output_fn=lambda module, output, mesh: output.to_local(),
        )
        fsdp_model = FSDP(model, device_mesh=mesh["dp"], device_id=self.device)
        with CommDebugMode() as comm:
            fsdp_model(torch.rand(2, 10, device=self.device)).sum().backward()
        gather = FSDP_GATHERS.get(self.device_type, FSDP_GATHERS["other"])
        counts = {op.__name__: count for op, count in comm.get_comm_counts().items()}
        self.assertEqual(counts, {**TP_COLLECTIVES, **gather, "_reduce_scatter_base_": 1})
        grads = [param.grad for param in fsdp_model.parameters() if param.grad is not None]
        self.assertGreater(len(grads), 0)
        for grad in grads:
            self.assertFalse(grad.isnan().any(), f"NaN in a gradient of rank {self.rank}")

    def test_fsdp_tp_sync_module_state(self):
        mesh = self.mesh_2d()
        torch.manual_seed(self.rank)
        model = ReplicatedState(mesh["tp"])
        for name in ("param", "buf"):
            self.assertFalse(self._equal_over_dp(getattr(model, name), mesh), f"{name} before")
        # FSDP1 refuses to sync modules on the CPU, which NCCL does not support; gloo does.
        check = "_check_module_states_for_sync_module_states"
        with mock.patch.object(_init_utils, check) if self.device_type == "cpu" else nullcontext():
            fsdp_model = FSDP(model, device_mesh=mesh["dp"], sync_module_states=True, device_id=self.device)
        with FSDP.summon_full_params(fsdp_model):
            for name in ("param", "buf"):
                self.assertTrue(
                    self._equal_over_dp(getattr(fsdp_model, name), mesh), f"{name} after sync_module_states"
                )

    def _equal_over_dp(self, value: DTensor, mesh: DeviceMesh) -> bool:
        mine = value.to_local().detach()
        group = mesh.get_group("dp")
        gathered = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(gathered, mine, group=group)
        return all(torch.equal(other, gathered[0]) for other in gathered[1:])


if __name__ == "__main__":
    run_tests()
