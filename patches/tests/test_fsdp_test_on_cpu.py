# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/fsdp/test_fsdp_misc.py

import copy
import unittest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous
from torch.testing._internal.common_utils import run_tests


def _check_fsdp_trains_as_ddp(test):
    test.assertEqual(dist.get_world_size(), 2)
    test.assertEqual(dist.get_backend(), "gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    outputs = []
    for wrap in (DDP, lambda model: FSDP(model, device_id=torch.device("cpu"))):
        wrapped = wrap(copy.deepcopy(model))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped(torch.full((2, 4), test.rank + 1.0)).sum().backward()
        optimizer.step()
        outputs.append(wrapped(torch.ones(1, 4)).detach())
    test.assertEqual(*outputs)


@unittest.skipIf(torch.accelerator.is_available(), "For the CPU alone")
class TestFSDPTestOnCPU(FSDPTest):
    def test_fsdp_trains_as_ddp(self):
        _check_fsdp_trains_as_ddp(self)


@unittest.skipIf(torch.accelerator.is_available(), "For the CPU alone")
class TestFSDPTestContinuousOnCPU(FSDPTestContinuous):
    def test_fsdp_trains_as_ddp(self):
        _check_fsdp_trains_as_ddp(self)


if __name__ == "__main__":
    run_tests()
