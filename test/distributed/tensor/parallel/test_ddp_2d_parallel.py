# Owner(s): ["oncall: distributed"]
"""Tensor parallelism within DDP trains like DDP alone, and its checkpoints load on other meshes.

The tests run in 4 ranks: on 4 accelerators if there are that many, else on the CPU.

PyTorch has moved its test to `_composable/test_composability/test_2d_composability.py`, as
`Test2dFSDP1ParallelIntegration`. This suite stays where the test was.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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

# Tensor-Parallel degree
TP_DEGREE = 2
LR = 3e-5


class TwoDParallel(DDP):
    """DDP over "dp" of a module that is tensor-parallel over "tp".

    The first forward takes the parameters away from the module: hooks of
    `_pre_dp_module_transform` put DTensors in their places. DDP and optimizers keep
    using those that there were before, which `trained` holds by name.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        placements = {name: parameter.placements for name, parameter in module.named_parameters()}
        _pre_dp_module_transform(module)
        super().__init__(module, process_group=mesh.get_group("dp"), **options)
        self.mesh = mesh
        self.trained = dict(self.named_parameters())
        self.placements: dict[str, tuple[Placement, ...]] = {
            f"module.{name}": (Replicate(), *placed) for name, placed in placements.items()
        }

    def as_dtensor(self, name: str, local: torch.Tensor) -> DTensor:
        """One tensor of the ranks' local parts, placed like the parameter; it shares the memory of `local`."""
        return DTensor.from_local(local.detach(), self.mesh, self.placements[name])


def init_model(
    device_type: str, model_parallel_size: int = TP_DEGREE, dtype: torch.dtype = torch.float32, **ddp_options: Any
) -> tuple[DDP, TwoDParallel, dist.ProcessGroup]:
    torch.manual_seed(0)
    model = DDP(MLPModule(device_type).to(dtype))
    torch.manual_seed(0)
    twod_model = MLPModule(device_type).to(dtype)

    mesh_2d = init_device_mesh(
        device_type,
        (dist.get_world_size() // model_parallel_size, model_parallel_size),
        mesh_dim_names=("dp", "tp"),
    )
    parallelize_plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    twod_model = parallelize_module(twod_model, mesh_2d["tp"], parallelize_plan)
    twod_model = TwoDParallel(twod_model, mesh_2d, **ddp_options)
    return model, twod_model, mesh_2d.get_group("dp")


class Test2dParallelIntegration(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 4

    def _check_module(self, m1: DDP, m2: TwoDParallel, check_grad: bool = False) -> None:
        named_parameters = dict(m1.named_parameters())
        self.assertEqual(set(m2.trained), set(named_parameters))
        for name, param_m2 in m2.trained.items():
            param_m1 = named_parameters[name]
            if check_grad:
                param_m1, param_m2 = param_m1.grad, param_m2.grad
            whole = m2.as_dtensor(name, param_m2).full_tensor()
            label = f"{'gradient of ' if check_grad else ''}{name}, rank {self.rank}"
            self.assertEqual(whole, param_m1, msg=label)

    @with_comms
    def test_2d_ddp_integration_functionality(self) -> None:
        model, twod_model, dp_pg = init_model(self.device_type)
        optim = torch.optim.Adam(model.parameters(), lr=LR)
        twod_optim = torch.optim.Adam(twod_model.parameters(), lr=LR)
        # Ranks of one tp group get the same input: they are one data-parallel rank.
        self._train(model, twod_model, optim, twod_optim, seed=1 + dist.get_rank(dp_pg))

        input = self._input(16, seed=1004 + dist.get_rank(dp_pg))
        self.assertEqual(twod_model(input), model(input))

    def _train(
        self,
        model: DDP,
        twod_model: TwoDParallel,
        optim: torch.optim.Optimizer,
        twod_optim: torch.optim.Optimizer,
        seed: int,
    ) -> None:
        """One step of both models, compared."""
        input = self._input(4, seed)
        output, twod_output = model(input), twod_model(input)
        self.assertEqual(twod_output, output, msg=f"output for seed {seed}")

        optim.zero_grad()
        twod_optim.zero_grad()
        # Not the plain sum, whose gradient is the same for all rows.
        output.square().sum().backward()
        twod_output.square().sum().backward()
        self._check_module(model, twod_model, check_grad=True)

        optim.step()
        twod_optim.step()
        self._check_module(model, twod_model)

    def _input(self, batch: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.rand(batch, 10, device=self.device_type)

    # -- What PyTorch's file leaves to do: options of DDP

    @with_comms
    def test_2d_ddp_gradient_as_bucket_view(self) -> None:
        twod_model = self._test_steps(gradient_as_bucket_view=True)
        grads = [parameter.grad for parameter in twod_model.trained.values()]
        storages = {grad.untyped_storage().data_ptr() for grad in grads}
        self.assertEqual(len(storages), 1, msg="the gradients are not views of DDP's one bucket")

    @with_comms
    def test_2d_ddp_static_graph(self) -> None:
        # DDP records the graph in the first step, and reduces late there.
        self._test_steps(static_graph=True)

    def _test_steps(self, **ddp_options: Any) -> TwoDParallel:
        model, twod_model, dp_pg = init_model(self.device_type, **ddp_options)
        optim = torch.optim.Adam(model.parameters(), lr=LR)
        twod_optim = torch.optim.Adam(twod_model.parameters(), lr=LR)
        for step in range(3):
            self._train(model, twod_model, optim, twod_optim, 1 + dist.get_rank(dp_pg) + 100 * step)
        input = self._input(16, seed=1004 + dist.get_rank(dp_pg))
        self.assertEqual(twod_model(input), model(input))
        return twod_model

    # -- What PyTorch's file leaves to do: checkpoints

    @with_comms
    @parametrize("dp", [1, 2, 4])
    def test_2d_ddp_save_and_load(self, dp: int) -> None:
        # A model on a (2, 2) mesh is saved after two steps. A new one on a (dp, 4 / dp)
        # mesh continues from there.
        saved, saved_optim = self._trainable_model(dp=2)
        for step in range(2):
            self._step(saved, saved_optim, step)
        loaded, loaded_optim = self._trainable_model(dp)
        before, wanted = full_state(loaded, loaded_optim), full_state(saved, saved_optim)
        for name, parameter in before["model"].items():
            self.assertNotEqual(parameter, wanted["model"][name], msg=name)

        with shared_directory() as directory:
            dcp.save(state(saved, saved_optim), checkpoint_id=directory)
            dcp.load(state(loaded, loaded_optim), checkpoint_id=directory)
        self.assertEqual(full_state(loaded, loaded_optim), full_state(saved, saved_optim))

        for step in range(2, 5):
            loss = self._step(saved, saved_optim, step)
            self.assertEqual(self._step(loaded, loaded_optim, step), loss, msg=f"loss, step {step}")
            self.assertEqual(full_state(loaded, loaded_optim), full_state(saved, saved_optim))

    def _trainable_model(self, dp: int) -> tuple[TwoDParallel, torch.optim.Optimizer]:
        """A model in float64, with a large learning rate, so that a step from a wrong state shows."""
        _, twod_model, _ = init_model(self.device_type, self.world_size // dp, torch.float64)
        optim = torch.optim.Adam(twod_model.parameters(), lr=0.05)
        for parameter in twod_model.parameters():
            # Adam creates these in its first step, but a checkpoint loads into existing
            # tensors only.
            optim.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return twod_model, optim

    def _step(self, twod_model: TwoDParallel, optim: torch.optim.Optimizer, step: int) -> torch.Tensor:
        """Train on a batch of 8, split over dp ranks: any dp gives the same step. Return the loss."""
        dp = twod_model.mesh["dp"]
        mine = self._input(8, step).double().chunk(dp.size())[dp.get_local_rank()]
        optim.zero_grad()
        loss = twod_model(mine).square().mean()
        loss.backward()
        optim.step()
        dist.all_reduce(loss := loss.detach())
        return loss / self.world_size


def state(model: TwoDParallel, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and Adam's state, in a form that a mesh of any shape can load."""
    return {
        "model": {name: model.as_dtensor(name, parameter) for name, parameter in model.trained.items()},
        "optim": {
            name: {
                key: model.as_dtensor(name, value) if value.ndim else value
                for key, value in optim.state[parameter].items()
            }
            for name, parameter in model.trained.items()
        },
    }


def full_state(model: TwoDParallel, optim: torch.optim.Optimizer) -> dict[str, Any]:
    def gather(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: gather(each) for key, each in value.items()}
        return value.full_tensor() if isinstance(value, DTensor) else value.clone()

    return gather(state(model, optim))


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


instantiate_parametrized_tests(Test2dParallelIntegration)

if __name__ == "__main__":
    run_tests()
