# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/tensor/test_embedding_ops.py

import torch
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)


class TestEmbeddingOp(DTensorTestBase):
    @with_comms
    def test_sharded_embedding_rowwise_rank_without_rows(self):
        mesh = self.build_device_mesh()
        # Over four ranks, five rows are 2, 2, 1 and 0, and six are 2, 2, 2 and 0.
        for rows in range(1, self.world_size + 3):
            weight = torch.arange(2.0 * rows, device=self.device_type).view(rows, 2)
            weight.requires_grad_()
            indices = torch.tensor([[0, rows - 1], [rows // 2, 0]])
            indices = indices.to(self.device_type)
            dist_weight = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            dist_weight.requires_grad_()
            dist_indices = distribute_tensor(indices, mesh, [Replicate()])

            output = torch.nn.functional.embedding(indices, weight)
            dist_output = torch.nn.functional.embedding(dist_indices, dist_weight)
            full_output = dist_output.full_tensor()
            self.assertEqual(full_output, output)

            factors = torch.arange(8.0, device=self.device_type).view(2, 2, 2)
            (output * factors).sum().backward()
            (full_output * factors).sum().backward()
            self.assertEqual(dist_weight.grad.full_tensor(), weight.grad)


if __name__ == "__main__":
    run_tests()
