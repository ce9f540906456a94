"""FSDP2 in threads and in persistent ranks, written as in PyTorch's tree."""

import copy

import torch
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import MLP, FSDPTestContinuous, FSDPTestMultiThread, check_sharded_parity
from torch.testing._internal.common_utils import run_tests


class TestInThreads(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 2

    def test_parameters_are_sharded(self):
        model = MLP(4, device=torch.device("cpu"))
        reference = copy.deepcopy(model)
        fully_shard(model)
        for full, sharded in zip(reference.parameters(), model.parameters(), strict=True):
            self.assertEqual(sharded.to_local().numel() * 2, full.numel())

    def test_subtests(self):
        self.run_subtests({"size": [2, 4]}, self.check)

    def check(self, size):
        model = fully_shard(MLP(size, device=torch.device("cpu")))
        self.assertEqual(len(list(model.parameters())), 4)


class TestInPersistentRanks(FSDPTestContinuous):
    world_size = 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_trains(self):
        torch.manual_seed(0)
        reference = MLP(4, device=torch.device("cpu"))
        model = fully_shard(copy.deepcopy(reference))
        check_sharded_parity(self, reference, model)
        self.assertEqual(self.process_group.size(), 2)

    @skip_if_lt_x_gpu(8)
    def test_needs_eight_devices(self): ...


if __name__ == "__main__":
    run_tests()
