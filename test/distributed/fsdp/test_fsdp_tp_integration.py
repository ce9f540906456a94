# Owner(s): ["oncall: distributed"]
"""FSDP1 around tensor parallelism trains like FSDP alone, and syncs module states.

On the CPU, the tests pass `device_id` to FSDP1, which would look for an accelerator
otherwise.
"""

from __future__ import annotations

import copy
import inspect
import sys
from contextlib import nullcontext
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import _init_utils
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    CPUOffload,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_testing_ext.common_distributed import at_least_x_gpu
from torch_testing_ext.common_fsdp import FSDPTest, FSDPTestContinuous
from torch_testing_ext.common_utils import TEST_WITH_DEV_DBG_ASAN, instantiate_parametrized_tests, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import MLPModule, RMSNormPython

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

if TEST_WITH_DEV_DBG_ASAN:
    print("Skip dev-asan as torch + multiprocessing spawn have known issues", file=sys.stderr)
    sys.exit(0)


class SimpleModel(torch.nn.Module):
    """Three linear layers, of which tensor parallelism shards the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = torch.nn.Linear(5, 8)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(8, 4)
        self.net3 = torch.nn.Linear(4, 12)

    def forward(self, x):
        return self.net3(self.net2(self.relu(self.net1(x))))

    @staticmethod
    def get_sharded_param_names() -> list[str]:
        return ["net1.weight", "net1.bias", "net2.weight"]

    @staticmethod
    def get_non_sharded_param_names() -> list[str]:
        return ["net3.weight", "net3.bias"]


def distribute_rmsnorm(module, device_mesh):
    """Let the norm, which has no sharded parameter, take and return shards of the rows."""

    def prepare_input_fn(mod, inputs, device_mesh):
        return DTensor.from_local(inputs[0], device_mesh, [Shard(0)])

    def prepare_output_fn(mod, outputs, device_mesh):
        return outputs.to_local()

    return distribute_module(module, device_mesh, input_fn=prepare_input_fn, output_fn=prepare_output_fn)


class TestTPFSDPIntegration(FSDPTest):
    @property
    def world_size(self) -> int:
        """A rank for each accelerator, 4 on the CPU; an even number, for the mesh."""
        return max(4, super().world_size // 2 * 2)

    @property
    def device_type(self) -> str:
        """The CPU beside 1 to 3 accelerators, too."""
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None and at_least_x_gpu(4) else "cpu"

    @property
    def device(self) -> torch.device:
        on_cpu = self.device_type == "cpu"
        return torch.device(self.device_type, None if on_cpu else torch.accelerator.current_device_index())

    def _get_params_and_sharding_info(
        self,
        model: SimpleModel,
        sharded_param_names: list[str],
        tensor_parallel_size: int,
    ) -> tuple[dict[str, int], dict[str, tuple[torch.Size, int]]]:
        """How many elements of each parameter a rank of tp has; of the sharded ones also shape and dim."""
        self.assertIs(type(model), SimpleModel)
        param_name_to_numel = {}
        param_name_to_sharding_info = {}
        for param_name, param in model.named_parameters():
            param_name_to_numel[param_name] = param.numel()
            if param_name in sharded_param_names:
                param_name_to_numel[param_name] //= tensor_parallel_size
                param_name_to_sharding_info[param_name] = (param.size(), 0 if "net1" in param_name else 1)
        return param_name_to_numel, param_name_to_sharding_info

    def _sync_tp_grads(
        self,
        tp_fsdp_model: FSDP,
        tp_pg: dist.ProcessGroup,
        param_name_to_numel: dict[str, int],
        non_sharded_param_names: list[str],
    ) -> None:
        """Average the gradients over tp, in place; FSDP has averaged them over dp.

        DTensor has summed those of the layers in the plan over tp. Those of the other
        parameters still differ between ranks of tp.
        """
        wrapped = [module for module in tp_fsdp_model.modules() if type(module) is FSDP]
        self.assertEqual(wrapped, [tp_fsdp_model], "the masks below are of one FSDP around the whole model")
        fsdp_world_size = self.world_size // tp_pg.size()
        unsummed = torch.cat(
            [torch.full((numel,), name in non_sharded_param_names) for name, numel in param_name_to_numel.items()]
        )
        sharded_mask = unsummed.chunk(fsdp_world_size)[self.rank // tp_pg.size()].to(self.device)
        grads = [param.grad for param in tp_fsdp_model.parameters() if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads]).to(self.device)
        summed = flat.clone()
        dist.all_reduce(summed, group=tp_pg)
        averaged = torch.where(sharded_mask, summed, flat) / tp_pg.size()
        for grad, part in zip(grads, averaged.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _get_grads_as_flattened(
        self,
        model: FSDP,
        uses_tp: bool,
        param_name_to_numel: dict[str, int],
        param_name_to_sharding_info: dict[str, tuple[torch.Size, int]],
        tp_pg: dist.ProcessGroup | None,
        fsdp_pg: dist.ProcessGroup,
        sharded_param_names: list[str] | None,
    ) -> torch.Tensor:
        """All gradients, whole and flattened, one after the other; the same on all ranks."""
        grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        shard = torch.cat(grads).to(self.device)
        shards = [torch.empty_like(shard) for _ in range(fsdp_pg.size())]
        dist.all_gather(shards, shard, group=fsdp_pg)
        if not uses_tp:
            return torch.cat(shards)
        whole = []
        splits = torch.cat(shards).split(list(param_name_to_numel.values()))
        for param_name, grad in zip(param_name_to_numel, splits, strict=True):
            if param_name in sharded_param_names:
                size, dim = param_name_to_sharding_info[param_name]
                local_size = list(size)
                local_size[dim] //= tp_pg.size()
                parts = [torch.empty_like(grad).view(local_size) for _ in range(tp_pg.size())]
                dist.all_gather(parts, grad.view(local_size).contiguous(), group=tp_pg)
                grad = torch.cat(parts, dim=dim).flatten()
            whole.append(grad)
        return torch.cat(whole)

    def test_fsdp_tp_integration(self):
        self._test_fsdp_options([CPUOffload(offload_params=False)])

    def _test_fsdp_tp_integration(self, cpu_offload, sharding_strategy, use_orig_params):
        """Compare with FSDP alone over all ranks.

        With sequence parallelism, the input of each rank of tp is a part of the batch. So
        both train on the same batch and must compute the same numbers.
        """
        tensor_parallel_size = 2
        LR = 3e-5
        torch.manual_seed(0)
        model = SimpleModel().to(self.device)
        tp_fsdp_model = copy.deepcopy(model)
        sharded_param_names = SimpleModel.get_sharded_param_names()
        param_name_to_numel, param_name_to_sharding_info = self._get_params_and_sharding_info(
            model, sharded_param_names, tensor_parallel_size
        )
        whole_sizes = {name: param.numel() for name, param in model.named_parameters()}

        torch.manual_seed(self.rank + 1)
        inp_size = [2, 3, 5]
        inp = torch.rand(*inp_size, device=self.device)
        self.assertEqual(model(inp), tp_fsdp_model(inp))

        options = {
            "cpu_offload": cpu_offload,
            "sharding_strategy": sharding_strategy,
            "use_orig_params": use_orig_params,
            "device_id": self.device,
        }
        mesh_1d = init_device_mesh(self.device.type, (self.world_size,))
        fsdp_model = FSDP(model, device_mesh=mesh_1d, **options)
        mesh_2d = self._mesh_2d(tensor_parallel_size)
        tp_pg, fsdp_pg = mesh_2d.get_group("tp"), mesh_2d.get_group("dp")
        sequence_parallelize_plan = {
            "net1": ColwiseParallel(input_layouts=Shard(0)),
            "net2": RowwiseParallel(output_layouts=Shard(0)),
        }
        tp_fsdp_model = parallelize_module(tp_fsdp_model, mesh_2d["tp"], sequence_parallelize_plan)
        for layer in (tp_fsdp_model.net1, tp_fsdp_model.net2):
            self.assertIsInstance(layer.weight, DTensor)
        tp_fsdp_model = FSDP(tp_fsdp_model, device_mesh=mesh_2d["dp"], **options)

        fsdp_out, tp_fsdp_out = fsdp_model(inp), tp_fsdp_model(inp)
        self.assertEqual(fsdp_out, tp_fsdp_out, msg=f"output of rank {self.rank}")
        fsdp_out.sum().backward()
        tp_fsdp_out.sum().backward()
        self._sync_tp_grads(tp_fsdp_model, tp_pg, param_name_to_numel, SimpleModel.get_non_sharded_param_names())
        model_grads = self._get_grads_as_flattened(
            fsdp_model,
            False,
            param_name_to_numel,
            param_name_to_sharding_info,
            None,
            dist.group.WORLD,
            None,
        )
        model_tp_grads = self._get_grads_as_flattened(
            tp_fsdp_model,
            True,
            param_name_to_numel,
            param_name_to_sharding_info,
            tp_pg,
            fsdp_pg,
            sharded_param_names,
        )
        for name, grad, tp_grad in zip(
            whole_sizes,
            model_grads.split(list(whole_sizes.values())),
            model_tp_grads.split(list(whole_sizes.values())),
            strict=True,
        ):
            self.assertEqual(grad, tp_grad, msg=f"gradient of {name} on rank {self.rank}")

        for trained in (fsdp_model, tp_fsdp_model):
            torch.optim.SGD(trained.parameters(), lr=LR).step()
        torch.manual_seed(self.rank + 16)
        inp = torch.rand(*inp_size, device=self.device)
        self.assertEqual(fsdp_model(inp), tp_fsdp_model(inp), msg=f"second output of rank {self.rank}")

    def test_fsdp_tp_extension_grad(self):
        mesh_2d = self._mesh_2d()
        device = self.device.type

        class TestModel(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mlp = MLPModule(device)
                self.mlp_norm = RMSNormPython(10)

            def forward(self, x):
                return self.mlp(self.mlp_norm(x))

        model = TestModel().to(self.device)
        tp_mesh = mesh_2d["tp"]
        tp_model = parallelize_module(
            model,
            tp_mesh,
            {
                "mlp.net1": ColwiseParallel(input_layouts=Shard(0)),
                "mlp.net2": RowwiseParallel(output_layouts=Shard(0)),
            },
        )
        distribute_rmsnorm(tp_model.mlp_norm, tp_mesh)

        fsdp_2d_model = FSDP(tp_model, device_mesh=mesh_2d["dp"], device_id=self.device)
        comm_mode = CommDebugMode()
        with comm_mode:
            fsdp_2d_model(torch.rand(2, 10, device=self.device)).sum().backward()

        funcol = torch.ops.c10d_functional
        c10d_ops = torch.ops.c10d
        # FSDP gathers a list of tensors on the CPU, and else one tensor, over gloo, too.
        gather = c10d_ops.allgather_ if self.device.type == "cpu" else c10d_ops._allgather_base_
        tp_comms = {funcol.reduce_scatter_tensor: 2, funcol.all_gather_into_tensor: 2, funcol.all_reduce: 1}
        fsdp_comms = {gather: 1, c10d_ops._reduce_scatter_base_: 1}
        self.assertEqual(dict(comm_mode.get_comm_counts()), {**tp_comms, **fsdp_comms})

        grads = [p.grad for p in fsdp_2d_model.parameters() if p.grad is not None]
        self.assertGreater(len(grads), 0)
        for grad in grads:
            self.assertFalse(grad.isnan().any().item(), f"NaN in a gradient of rank {self.rank}")

    def test_fsdp_tp_sync_module_state(self):
        mesh_2d = self._mesh_2d()
        tp_mesh, dp_mesh = mesh_2d["tp"], mesh_2d["dp"]
        torch.manual_seed(self.rank)

        class TestModel(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.param = torch.nn.Parameter(self._replicated())
                self.buf = torch.nn.Buffer(self._replicated())

            @staticmethod
            def _replicated() -> DTensor:
                values = torch.randn(8, 8, device=tp_mesh.device_type)
                return DTensor.from_local(values, tp_mesh, [Replicate()], run_check=False)

        def assert_local_shard_across_ranks(local_tensor, group, check_equal, label):
            gathered_tensors = [torch.empty_like(local_tensor) for _ in range(group.size())]
            dist.all_gather(gathered_tensors, local_tensor, group=group)
            first, *others = gathered_tensors
            for other in others:
                self.assertEqual(torch.equal(other, first), check_equal, msg=label)

        model = TestModel()
        dp_group = dp_mesh.get_group()
        for name in ("param", "buf"):
            local = getattr(model, name).to_local().detach()
            assert_local_shard_across_ranks(local, dp_group, False, f"{name} before")

        # FSDP1 refuses to sync modules on the CPU, which NCCL does not support; gloo does.
        check = "_check_module_states_for_sync_module_states"
        with mock.patch.object(_init_utils, check) if self.device.type == "cpu" else nullcontext():
            fsdp_mod = FSDP(model, device_mesh=dp_mesh, sync_module_states=True, device_id=self.device)
        with fsdp_mod.summon_full_params(fsdp_mod):
            for name in ("param", "buf"):
                local = getattr(fsdp_mod, name).to_local().detach()
                assert_local_shard_across_ranks(local, dp_group, True, f"{name} after sync_module_states")

    # -- What PyTorch's file does not have

    def test_fsdp_tp_integration_cpu_offload(self):
        # PyTorch has this in `test_fsdp_tp_integration`. Here, a report shows the gap.
        if self.device.type == "cpu":
            self.skipTest("FSDP1 pins the memory of offloaded parameters, which takes an accelerator")
        self._test_fsdp_options([CPUOffload(offload_params=True)])

    def _test_fsdp_options(self, cpu_offload: list[CPUOffload]) -> None:
        self.run_subtests(
            {
                "cpu_offload": cpu_offload,
                "sharding_strategy": [None, ShardingStrategy.SHARD_GRAD_OP],
                "use_orig_params": [False, True],
            },
            self._test_fsdp_tp_integration,
        )

    def _mesh_2d(self, tensor_parallel_size: int = 2) -> DeviceMesh:
        shape = self.world_size // tensor_parallel_size, tensor_parallel_size
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))


class OnSharedRanks(FSDPTestContinuous):
    """4 ranks that a class keeps: on accelerators if there are as many, else on the CPU."""

    world_size = 4

    @classmethod
    def device_type(cls) -> str:
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None and at_least_x_gpu(4) else "cpu"

    @classmethod
    def backend_str(cls) -> str:
        return "gloo" if cls.device_type() == "cpu" else super().backend_str()

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        # FSDPTestContinuous skips where there are fewer accelerators than ranks.
        base = FSDPTestContinuous if cls.device_type() == "cpu" else OnSharedRanks
        super(base, cls)._init_pg(rank, world_size, rdvz_file)

    @property
    def device(self) -> torch.device:
        device_type = self.device_type()
        return torch.device(device_type, None if device_type == "cpu" else torch.accelerator.current_device_index())


# The tests on the base of PyTorch's newest version of this file.
TestTPFSDPIntegrationContinuous = type(
    "TestTPFSDPIntegrationContinuous",
    (OnSharedRanks,),
    {name: member for name, member in vars(TestTPFSDPIntegration).items() if inspect.isfunction(member)},
)

instantiate_parametrized_tests(TestTPFSDPIntegration)

if __name__ == "__main__":
    run_tests()
