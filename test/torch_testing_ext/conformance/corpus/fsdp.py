"""FSDPTest, FSDPTestContinuous, FSDPTestMultiThread on a machine without accelerators."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from notes import note
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_distributed import TEST_SKIPS, skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import MLP, FSDPTest, FSDPTestContinuous, FSDPTestMultiThread, get_devtype
from torch.testing._internal.common_utils import run_tests


class OwnRunTest(FSDPTest):
    """A `_run` of its own, for gloo on the CPU: as backends of other vendors have it."""

    @property
    def world_size(self):
        return 2

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        dist.init_process_group("gloo", init_method=self.init_method, rank=rank, world_size=self.world_size)
        dist.barrier()
        self.run_test(test_name, pipe)
        dist.barrier()
        dist.destroy_process_group()

    def test_runs(self):
        note(self, "body", self.rank, self.world_size, dist.get_backend())

    def test_process_group(self):
        note(self, self.process_group is dist.group.WORLD)

    def test_init_method(self):
        note(self, self.init_method.startswith("file://"), self.init_method.endswith(self.file_name))

    def test_destroy_upon_exit(self):
        note(self, self.destroy_pg_upon_exit)

    def test_fails(self):
        raise ValueError("in an FSDP test")

    def test_skips(self):
        self.skipTest("in an FSDP test")

    @skip_if_lt_x_gpu(2)
    def test_needs_gpus(self):
        note(self, "body")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_needs_gpus_or_cpu(self):
        note(self, "body")

    def test_collective(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        note(self, tensor.item())

    def test_subtests(self):
        self.run_subtests({"n": [1, 2]}, self.check)

    def check(self, n):
        note(self, n)

    def test_model(self):
        torch.manual_seed(0)
        note(self, [tuple(parameter.shape) for parameter in MLP(4).parameters()])

    def test_fully_shard(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = nn.Linear(4, 2, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model(torch.ones(1, 4)).sum().backward()
        note(self, model.weight.grad.to_local().tolist())


class WithoutAcceleratorsTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2)
    def test_needs_two(self):
        note(self, "body")


class RunSkipsTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        sys.exit(TEST_SKIPS["importerror"].exit_code)

    def test_skips(self):
        note(self, "body")


class ContinuousOwnInitTest(FSDPTestContinuous):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        dist.init_process_group("gloo", init_method=f"file://{rdvz_file}", rank=rank, world_size=world_size)

    def test_runs(self):
        note(self, "body", dist.get_backend(), self.rank, self.world_size)

    def test_subtests(self):
        self.run_subtests({"n": [1]}, self.check)

    def check(self, n):
        note(self, n)


class ThreadsTest(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 2

    def test_runs(self):
        note(self, self.rank, dist.get_world_size())

    def test_subtests(self):
        self.run_subtests({"n": [1, 2]}, self.check)

    def check(self, n):
        note(self, n)

    @skip_if_lt_x_gpu(1)
    def test_needs_one(self):
        note(self, "body")

    def test_devtype(self):
        note(self, get_devtype(), common_fsdp.DEVICE_TYPE)


if __name__ == "__main__":
    run_tests()
