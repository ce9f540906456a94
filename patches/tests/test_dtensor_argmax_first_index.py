# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/tensor/test_math_ops.py

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import (
    create_local_tensor_test_class,
    DTensorTestBase,
    with_comms,
)


class DistMathOpsTest(DTensorTestBase):
    @with_comms
    def test_argmax_argmin_first_index(self):
        # Few distinct values, so that most elements are equal to others.
        nan = float("nan")
        tensors = [
            [[0, 5, 5, 5], [5, 0, 0, 0], [5, 0, 0, 5], [0, 5, 5, 0]],
            [[1, 2, 2, 0], [2, 0, 1, 2], [2, 2, 0, 0], [0, 0, 1, 2]],
            [[0, 0, nan, 3], [nan, 3, 0, 0], [0, nan, 3, 3], [nan, 0, 3, 0]],
        ]
        ops = [
            torch.argmax,
            torch.argmin,
            lambda t: t.argmax(0),
            lambda t: t.argmin(1, keepdim=True),
        ]
        mesh = self.build_device_mesh()
        mesh_2d = init_device_mesh(self.device_type, (2, self.world_size // 2))
        layouts = [
            (mesh, [Shard(0)]),
            (mesh, [Shard(1)]),
            (mesh, [Replicate()]),
            (mesh_2d, [Shard(1), Shard(0)]),
            (mesh_2d, [Shard(0), Shard(1)]),
            (mesh_2d, [Shard(0), Shard(0)]),
            (mesh_2d, [Replicate(), Shard(1)]),
        ]
        for values in tensors:
            tensor = torch.tensor(values, dtype=torch.float, device=self.device_type)
            for device_mesh, placements in layouts:
                dtensor = distribute_tensor(tensor, device_mesh, placements)
                for op in ops:
                    self.assertEqual(op(dtensor).full_tensor(), op(tensor))


DistMathOpsTestWithLocalTensor = create_local_tensor_test_class(
    DistMathOpsTest,
)

if __name__ == "__main__":
    run_tests()
