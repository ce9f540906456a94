"""Tests that need 4 accelerators, in ranks that share one. The accelerator is made up: its functions only take notes.

On real devices: the check `suites-ranks-per-gpu` of benchmarks/gpu/run.
"""

import os
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torch_testing_ext import launch
from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._testing.bases import shared_devices
from torch_testing_ext._testing.marks.needs import Skipped
from torch_testing_ext._testing.sharded import dtensor_devices, fsdp_devices
from torch_testing_ext._torch.devices import cuda_state
from torch_testing_ext.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    init_multigpu_helper,
    skip_if_lt_x_gpu,
)
from torch_testing_ext.common_fsdp import FSDPTest, FSDPTestContinuous
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase

GIB = 2**30


def one_gpu(ranks, nccl=(2, 28, 9)):
    """One accelerator that does not exist, for so many ranks."""
    return (
        mock.patch.dict(os.environ, {device_sharing.RANKS_PER_GPU: str(ranks)}),
        mock.patch.multiple(accelerators, device_count=lambda: 1, accelerator_type=lambda: "cuda"),
        mock.patch.object(cuda_state, "nccl_version", lambda: nccl),
    )


class OneGpuCase(unittest.TestCase):
    def use(self, *patches):
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)


class Example(DTensorTestBase):
    """What the ranks of `InRanksTest` run."""

    __test__ = False

    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4)
    def test_shared(self):
        calls = torch.cuda.set_device.calls
        self.assertEqual((self.device_type, self.backend), ("cuda", "gloo"))
        self.init_pg(False)
        self.assertEqual(dist.get_backend(), "gloo")
        self.assertEqual(dist.get_default_backend_for_device("cuda"), "gloo")
        torch.cuda.set_device(self.rank)
        torch.cuda.set_device(torch.device("cuda", self.rank))
        torch.cuda.set_device("cuda")
        self.assertEqual(calls, [("index", 0), 0, 0, "cuda"])
        total = torch.tensor([self.rank])
        dist.all_reduce(total)
        self.assertEqual(total.item(), 6)
        dist.destroy_process_group()


class InRanksTest(OneGpuCase):
    def setUp(self):
        # Ranks are forked from a process that was forked from this one: it must have the stand-ins, too.
        launch.close()
        self.addCleanup(launch.close)

    def test_four_ranks_on_one_gpu_over_gloo(self):
        calls = []

        def set_device(device):
            calls.append(device)

        set_device.calls = calls
        self.use(
            *one_gpu(4),
            mock.patch.object(torch.cuda, "set_device", set_device),
            mock.patch.object(torch.accelerator, "set_device_index", lambda index: calls.append(("index", index))),
            mock.patch.object(cuda_state, "when_cuda_is_first_used", lambda call: None),
        )
        result = unittest.TestResult()
        Example("test_shared").run(result)
        self.assertEqual(result.errors + result.failures, [])
        self.assertEqual(result.skipped, [])

    def test_without_the_setting_it_skips(self):
        self.use(*one_gpu(1))
        result = unittest.TestResult()
        Example("test_shared").run(result)
        self.assertEqual([reason for _, reason in result.skipped], ["Need at least 4 accelerator devices"])

    def test_too_few_for_the_test_still(self):
        self.use(*one_gpu(3))
        result = unittest.TestResult()
        Example("test_shared").run(result)
        self.assertEqual(len(result.skipped), 1, result)


class BeginTest(OneGpuCase):
    """What `begin` arranges in a rank; it is called here, in the process of the test, on stand-ins."""

    def begin(self, rank, world_size, **environ):
        self.calls = []
        cuda = mock.MagicMock()
        cuda.get_device_properties.return_value.total_memory = 80 * GIB
        cuda.set_device = lambda index: self.calls.append(("set_device", index))
        cuda.set_per_process_memory_fraction = lambda part, index: self.calls.append((round(part, 4), index))
        self.folded = []
        self.use(
            mock.patch.object(torch, "cuda", cuda),
            mock.patch.object(cuda_state, "when_cuda_is_first_used", lambda call: call()),
            mock.patch.object(cuda_state, "fold_device_numbers", lambda count, kind: self.folded.append(count)),
            mock.patch.dict(dist.Backend.default_device_backend_map),
            mock.patch.dict(os.environ, environ),
        )
        shared_devices.prepare_shared_devices(rank, world_size)

    def test_over_gloo(self):
        self.use(*one_gpu(4))
        self.begin(3, 4)
        self.assertEqual(
            self.calls, [("set_device", 0), (round((20 * GIB - device_sharing.CONTEXT) / (80 * GIB), 4), 0)]
        )
        self.assertEqual(self.folded, [1])
        self.assertEqual(dist.Backend.default_device_backend_map["cuda"], "gloo")
        self.assertNotIn("NCCL_MULTI_RANK_GPU_ENABLE", os.environ)

    def test_over_nccl(self):
        self.use(*one_gpu(4, nccl=(2, 30, 7)))
        self.begin(3, 4, NCCL_DEBUG="", NCCL_NVLS_ENABLE="1")
        self.assertEqual(os.environ["NCCL_MULTI_RANK_GPU_ENABLE"], "1")
        # With 1, NCCL refuses ranks that share a GPU.
        self.assertEqual(os.environ["NCCL_NVLS_ENABLE"], "0")
        self.assertEqual(os.environ["NCCL_MAX_CTAS"], "8")
        self.assertEqual(dist.Backend.default_device_backend_map["cuda"], "nccl")

    def test_nothing_where_each_rank_has_a_device(self):
        self.use(*one_gpu(4))
        self.begin(0, 1)
        self.assertEqual((self.calls, self.folded), ([], []))

    def test_nothing_by_default(self):
        self.use(*one_gpu(1))
        self.begin(0, 4)
        self.assertEqual((self.calls, self.folded), ([], []))


class BasesTest(OneGpuCase):
    """How many ranks the bases have, and which backend."""

    def test_world_sizes_and_backends(self):
        class Fsdp(FSDPTest):
            @skip_if_lt_x_gpu(4)
            def test_four(self):
                pass

            def test_any(self):
                pass

        class FsdpContinuous(FSDPTestContinuous):
            @skip_if_lt_x_gpu(2)
            def test_two(self):
                pass

        class Continuous(MultiProcContinuousTest):
            @skip_if_lt_x_gpu(3)
            def test_three(self):
                pass

        self.use(*one_gpu(4))
        four = Fsdp("test_four")
        self.assertEqual((four.world_size, four.device_type), (4, "cuda"))
        self.assertIsNone(four._known_skip())
        self.assertEqual(Fsdp("test_any").world_size, 1)
        self.assertEqual(FsdpContinuous._get_world_size("cuda"), 2)
        self.assertEqual(FsdpContinuous.backend_str(), "gloo")
        with mock.patch.object(torch, "get_device_module", lambda kind: mock.Mock(device_count=lambda: 1)):
            self.assertEqual(Continuous._get_world_size("cuda"), 3)
        self.assertEqual(dtensor_devices.num_devices(), 4)
        self.assertEqual(dtensor_devices.device_type_for(4), "cuda")
        self.assertEqual(dtensor_devices.device_type_for(5), "cpu")
        self.assertEqual(fsdp_devices.backend_for(4), "gloo")
        self.assertEqual(fsdp_devices.compute_device(3), torch.device("cuda", 0))
        self.assertEqual(init_multigpu_helper(4, "nccl"), {rank: [0] for rank in range(4)})

    def test_nccl_where_it_allows_that(self):
        self.use(*one_gpu(4, nccl=(2, 30, 7)))
        self.assertEqual(fsdp_devices.backend_for(4), "nccl")
        shared_devices.check_backend("nccl", 4)

    def test_a_test_of_nccl_skips_where_it_does_not(self):
        self.use(*one_gpu(4))
        with self.assertRaisesRegex(Skipped, r"NCCL 2\.28\.9 does not let 4 ranks share 1 GPU"):
            shared_devices.check_backend("cpu:gloo,cuda:nccl", 4)
        shared_devices.check_backend("nccl", 1)
        shared_devices.check_backend("gloo", 4)

    def test_create_pg(self):
        class Base(DistributedTestBase):
            @property
            def world_size(self):
                return 4

            def test_it(self):
                pass

        self.use(*one_gpu(4))
        base = Base("test_it")
        self.assertEqual(base.backend("cuda"), "gloo")
        self.assertEqual(base.backend("cpu"), "gloo")
        with self.assertRaisesRegex(Skipped, "does not let"):
            base.create_pg("cuda", backend="nccl")

    def test_decorators(self):
        class Plain(MultiProcessTestCase):
            @skip_if_lt_x_gpu(4)
            def test_it(self):
                pass

        self.use(*one_gpu(4))
        self.assertIsNone(Plain("test_it")._known_skip())
        with mock.patch.dict(os.environ, {device_sharing.RANKS_PER_GPU: "2"}):
            self.assertIsNotNone(Plain("test_it")._known_skip())


class GatherListsTest(DistributedTestBase):
    """gloo would crash with CUDA tensors. On the CPU it does not, so the operations are counted."""

    world_size = 3

    def test_one_by_one(self):
        self.create_pg("cpu")
        cuda_state.gather_lists_one_by_one("CPU")
        mine = [torch.full((2,), float(self.rank)), torch.tensor([self.rank]), torch.empty(0)]
        ranks, group = torch.arange(3), dist.group.WORLD
        gather = mock.Mock(side_effect=dist.ProcessGroup._allgather_base)
        with mock.patch.object(dist.ProcessGroup, "_allgather_base", lambda *args: gather(*args)):
            wholes = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(mine, 3, group.group_name)
            wholes = [torch.ops._c10d_functional.wait_tensor(whole) for whole in wholes]
            self.assertEqual(wholes, [ranks.float().repeat_interleave(2), ranks, torch.empty(0)])
            self.assertEqual(gather.call_count, 3)
            whole = DTensor.from_local(mine[1], init_device_mesh("cpu", (3,)), [Shard(0)]).full_tensor()
            self.assertEqual(whole, ranks)
            self.assertEqual(gather.call_count, 4)


if __name__ == "__main__":
    unittest.main()
