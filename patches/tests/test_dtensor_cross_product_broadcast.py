# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/tensor/test_math_ops.py

import itertools

import torch
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import (
    create_local_tensor_test_class,
    DTensorTestBase,
    with_comms,
)


class DistMathOpsTest(DTensorTestBase):
    @with_comms
    def test_linalg_cross_broadcast(self):
        mesh = self.build_device_mesh()
        # The size of the dim of the product is 3. In all but one case, an input is
        # broadcast.
        shapes = [
            ((1, 3), (4, 3)),
            ((5, 3), (1, 3)),
            ((1, 3), (1, 3)),
            ((3, 1), (3, 4)),
            ((5, 3), (5, 3)),
        ]
        placements = [Replicate(), Shard(0), Shard(1)]
        for (shape, other_shape), (placement, other_placement) in itertools.product(
            shapes, itertools.product(placements, placements)
        ):
            dim = shape.index(3)
            tensor, other = (
                torch.arange(float(torch.Size(size).numel())).view(size) % 5 + offset
                for offset, size in enumerate((shape, other_shape))
            )
            tensor, other = tensor.to(self.device_type), other.to(self.device_type)
            result = torch.linalg.cross(
                distribute_tensor(tensor, mesh, [placement]),
                distribute_tensor(other, mesh, [other_placement]),
                dim=dim,
            )
            expected = torch.linalg.cross(tensor, other, dim=dim)
            self.assertEqual(result.full_tensor(), expected)
            local = distribute_tensor(expected, mesh, result.placements).to_local()
            self.assertEqual(result.to_local().shape, local.shape)


DistMathOpsTestWithLocalTensor = create_local_tensor_test_class(
    DistMathOpsTest,
)

if __name__ == "__main__":
    run_tests()
