# Owner(s): ["oncall: distributed"]
"""Tensor parallelism within DDP, on a (dp, tp) mesh, trains like DDP alone, and its checkpoints load on other meshes.

The tests run in 4 ranks: on 4 accelerators if there are that many, otherwise on the CPU with gloo.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, MLPModule, with_comms

TP_DEGREE = 2
LR = 3e-5


@dataclass
class TwoDModel:
    """MLPModule, tensor-parallel over "tp", in DDP over "dp", with its parameters by name.

    The parameters are read before the first forward, in which hooks of `_pre_dp_module_transform` replace them with
    DTensors: afterwards the module lists no parameters. DDP and optimizers keep using the ones read here.
    """

    ddp: DDP
    mesh: DeviceMesh
    parameters: dict[str, nn.Parameter]
    tp_placements: dict[str, tuple[Placement, ...]]

    def as_dtensor(self, name: str, local: torch.Tensor) -> DTensor:
        """One tensor of the ranks' local parts, placed like the parameter; it shares the memory of `local`."""
        return DTensor.from_local(local.detach(), self.mesh, [Replicate(), *self.tp_placements[name]])

    def state(self, optim: torch.optim.Optimizer) -> dict[str, Any]:
        """Parameters and Adam's state, in a form that a mesh of any shape can load."""
        return {
            "model": {name: self.as_dtensor(name, parameter) for name, parameter in self.parameters.items()},
            "optim": {
                name: {
                    key: self.as_dtensor(name, value) if value.ndim else value
                    for key, value in optim.state[parameter].items()
                }
                for name, parameter in self.parameters.items()
            },
        }


def init_model(model: nn.Module, mesh: DeviceMesh, **ddp_options: Any) -> TwoDModel:
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    placements = {name: parameter.placements for name, parameter in model.named_parameters()}
    _pre_dp_module_transform(model)
    parameters = dict(model.named_parameters())
    ddp = DDP(model, process_group=mesh["dp"].get_group(), **ddp_options)
    return TwoDModel(ddp, mesh, parameters, placements)


@contextmanager
def shared_directory() -> Iterator[Path]:
    """One new directory for all ranks."""
    chosen = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    try:
        dist.broadcast_object_list(chosen)
        yield Path(chosen[0] or "")
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(chosen[0] or "", ignore_errors=True)


class Test2dParallelIntegration(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 4

    def build_2d_mesh(self, dp: int) -> DeviceMesh:
        return init_device_mesh(self.device_type, (dp, self.world_size // dp), mesh_dim_names=("dp", "tp"))

    def seeded_input(self, batch: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.rand(batch, 10, device=self.device_type)

    # -- the same numbers as DDP alone

    @with_comms
    def test_2d_ddp_integration_functionality(self) -> None:
        self.check_against_ddp(steps=1)

    @with_comms
    def test_2d_ddp_gradient_as_bucket_view(self) -> None:
        two_d = self.check_against_ddp(steps=3, gradient_as_bucket_view=True)
        storages = {parameter.grad.untyped_storage().data_ptr() for parameter in two_d.parameters.values()}
        self.assertEqual(len(storages), 1, msg="the gradients are not views of DDP's one bucket")

    @with_comms
    def test_2d_ddp_static_graph(self) -> None:
        # DDP records the graph and reduces the gradients late in the first step, and relies on the graph afterwards.
        self.check_against_ddp(steps=3, static_graph=True)

    def check_against_ddp(self, steps: int, **ddp_options: Any) -> TwoDModel:
        ddp = DDP(MLPModule(self.device_type))
        mesh = self.build_2d_mesh(dp=self.world_size // TP_DEGREE)
        two_d = init_model(MLPModule(self.device_type), mesh, **ddp_options)
        optim = torch.optim.Adam(ddp.parameters(), lr=LR)
        two_d_optim = torch.optim.Adam(two_d.parameters.values(), lr=LR)
        # Ranks of one tp group get the same input: together they are one data-parallel rank.
        seed = 1 + mesh.get_local_rank("dp")

        for step in range(steps):
            x = self.seeded_input(4, seed + 100 * step)
            output, two_d_output = ddp(x), two_d.ddp(x)
            self.assertEqual(two_d_output, output, msg=f"step {step}")
            optim.zero_grad()
            two_d_optim.zero_grad()
            output.square().sum().backward()
            two_d_output.square().sum().backward()
            self._check_module(two_d, ddp.module, check_grad=True)
            optim.step()
            two_d_optim.step()
            self._check_module(two_d, ddp.module)

        x = self.seeded_input(16, seed + 1004)
        self.assertEqual(two_d.ddp(x), ddp(x))
        return two_d

    def _check_module(self, two_d: TwoDModel, model: nn.Module, check_grad: bool = False) -> None:
        expected = dict(model.named_parameters())
        self.assertEqual(set(two_d.parameters), set(expected))
        for name, parameter in expected.items():
            local = two_d.parameters[name]
            actual, wanted = (local.grad, parameter.grad) if check_grad else (local, parameter)
            label = f"{'gradient of ' if check_grad else ''}{name}, rank {self.rank}"
            self.assertEqual(two_d.as_dtensor(name, actual).full_tensor(), wanted, msg=label)

    # -- checkpoints

    @with_comms
    @parametrize("dp", [1, 2, 4])
    def test_2d_ddp_save_and_load(self, dp: int) -> None:
        # A model on a (2, 2) mesh is saved after two steps. A new model on a (dp, 4 / dp) mesh continues from there.
        saved, saved_optim = self.trainable_model(dp=2)
        for step in range(2):
            self.step(saved, saved_optim, step)
        loaded, loaded_optim = self.trainable_model(dp)
        for name, parameter in self.full_state(loaded, loaded_optim)["model"].items():
            self.assertNotEqual(parameter, self.full_state(saved, saved_optim)["model"][name], msg=name)

        with shared_directory() as directory:
            dcp.save(saved.state(saved_optim), checkpoint_id=directory)
            dcp.load(loaded.state(loaded_optim), checkpoint_id=directory)
        self.assertEqual(self.full_state(loaded, loaded_optim), self.full_state(saved, saved_optim))

        for step in range(2, 5):
            loss = self.step(saved, saved_optim, step)
            self.assertEqual(self.step(loaded, loaded_optim, step), loss, msg=f"loss, step {step}")
            self.assertEqual(self.full_state(loaded, loaded_optim), self.full_state(saved, saved_optim))

    def trainable_model(self, dp: int) -> tuple[TwoDModel, torch.optim.Optimizer]:
        """A model in float64, with a large learning rate, so that a step from a wrong state shows."""
        two_d = init_model(MLPModule(self.device_type).double(), self.build_2d_mesh(dp))
        optim = torch.optim.Adam(two_d.parameters.values(), lr=0.05)
        for parameter in two_d.parameters.values():
            # Adam creates these in its first step, but a checkpoint loads into existing tensors only.
            optim.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return two_d, optim

    def step(self, two_d: TwoDModel, optim: torch.optim.Optimizer, step: int) -> torch.Tensor:
        """Train on a batch of 8, split over the data-parallel ranks: any dp gives the same step. Return the loss."""
        dp = two_d.mesh["dp"]
        mine = self.seeded_input(8, step).double().chunk(dp.size())[dp.get_local_rank()]
        optim.zero_grad()
        loss = two_d.ddp(mine).square().mean()
        loss.backward()
        optim.step()
        dist.all_reduce(loss := loss.detach())
        return loss / self.world_size

    def full_state(self, two_d: TwoDModel, optim: torch.optim.Optimizer) -> dict[str, Any]:
        def gather(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: gather(each) for key, each in value.items()}
            return value.full_tensor() if isinstance(value, DTensor) else value.clone()

        return gather(two_d.state(optim))


instantiate_parametrized_tests(Test2dParallelIntegration)

if __name__ == "__main__":
    run_tests()
