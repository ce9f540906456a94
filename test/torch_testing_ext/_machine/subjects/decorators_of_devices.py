import fake_cuda
import torch

from torch_testing_ext import common_cuda as cuda, common_distributed as dist, common_utils as utils
from torch_testing_ext._torch.devices.first_accelerator_use import first_use


def test(self):
    ran.append(self)


ran = []
for decorate in (
    dist.requires_multicast_support(),
    dist.skip_if_lt_x_gpu(2),
    dist.skip_if_no_gpu,
    cuda.xfailIfSM89,
    cuda.xfailIfSM100OrLater,
    cuda.tf32_on_and_off(),
    utils.skipIfRocmArch(("gfx90a",)),
    utils.requires_cuda_p2p_access(),
    dist.requires_nccl_version((2, 10), ""),
):
    decorate(test)
assert dist.sm_is_or_higher_than(torch.device("cuda"), 8, 0)
assert not dist.sm_is_or_higher_than(torch.device("cuda", 3), 9, 1)
print(first_use())
