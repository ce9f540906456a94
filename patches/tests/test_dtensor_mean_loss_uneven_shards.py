# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/tensor/test_decompositions.py

import torch
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)


class TestDecompShardingWithComms(DTensorTestBase):
    @with_comms
    def test_mean_losses_of_uneven_shards(self):
        """
        The mean of the ranks' means is the mean only if all shards are even.

        The shapes are those of shards that differ, of a rank without elements, and
        of even shards, which need no communication before the loss.
        """
        mesh = self.build_device_mesh()
        losses = [
            lambda t: torch.nn.functional.mse_loss(t, t * 2),
            lambda t: torch.nn.functional.huber_loss(t, t * 3),
            lambda t: torch.nn.functional.smooth_l1_loss(t, t * 3),
            lambda t: torch.nn.functional.soft_margin_loss(t, t / 10),
            lambda t: torch.nn.functional.binary_cross_entropy(t / 100, t / 120),
            lambda t: torch.nn.functional.binary_cross_entropy_with_logits(t, t / 3),
            lambda t: torch.nn.functional.mse_loss(t, t * 2, reduction="sum"),
        ]
        for shape in ((6,), (3,), (7, 5), (4, 8)):
            numel = torch.Size(shape).numel()
            tensor = torch.arange(1.0, 1 + numel, device=self.device_type).view(shape)
            for dim in range(tensor.ndim):
                dtensor = distribute_tensor(tensor, mesh, [Shard(dim)])
                for loss in losses:
                    with CommDebugMode() as comm_mode:
                        result = loss(dtensor)
                    self.assertEqual(result.full_tensor(), loss(tensor))
                    if shape[dim] % self.world_size == 0:
                        self.assertEqual(comm_mode.get_total_counts(), 0)


if __name__ == "__main__":
    run_tests()
