# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/tensor/test_convolution_ops.py

import itertools

import torch
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.nn import functional as F
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)


class DistConvolutionOpsTest(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 2

    @with_comms
    def test_conv_with_any_placements(self):
        mesh = self.build_device_mesh()
        choices = [Replicate(), Shard(0), Shard(1)]
        for conv, dims in ((F.conv1d, 1), (F.conv2d, 2)):
            inp = torch.arange(2.0 * 2 * 4**dims).view(2, 2, *[4] * dims) % 7 - 3
            weight = torch.arange(4.0 * 2 * 3**dims).view(4, 2, *[3] * dims) % 5 - 2
            args = [
                arg.to(self.device_type) for arg in (inp, weight, torch.arange(4.0))
            ]
            ref_args = [arg.clone().requires_grad_() for arg in args]
            ref_out = conv(*ref_args)
            ref_out.sum().backward()

            for placements in itertools.product(choices, choices, choices[:2]):
                dist_args = [
                    distribute_tensor(arg, mesh, [placement]).requires_grad_()
                    for arg, placement in zip(args, placements)
                ]
                out = conv(*dist_args)
                out.sum().backward()
                self.assertEqual(out.full_tensor(), ref_out)
                for dist_arg, ref_arg in zip(dist_args, ref_args):
                    self.assertEqual(dist_arg.grad.full_tensor(), ref_arg.grad)


if __name__ == "__main__":
    run_tests()
