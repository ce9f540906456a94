"""Losses that are traced through their decomposition, over shards that differ in size."""

import unittest

import ranks
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

LOSSES = {
    "mse": lambda t: F.mse_loss(t, t * 2),
    "huber": lambda t: F.huber_loss(t, t * 3),
    "smooth_l1": lambda t: F.smooth_l1_loss(t, t * 3),
    "binary cross entropy": lambda t: F.binary_cross_entropy_with_logits(t, t / 3),
    "binary cross entropy of probabilities": lambda t: F.binary_cross_entropy(t / 100, t / 120),
    "soft margin": lambda t: F.soft_margin_loss(t, t / 10),
    "mse, summed": lambda t: F.mse_loss(t, t * 2, reduction="sum"),
}
SHAPES = ((3,), (4,), (5, 2), (2, 3), (7, 3))


def wrong() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for name, loss in LOSSES.items():
        for shape in SHAPES:
            for dim in range(len(shape)):
                full = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
                got = loss(distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None)).full_tensor()
                if not torch.allclose(got, loss(full)):
                    found.append(f"{name} of {shape} sharded on {dim}: {got.item()}, not {loss(full).item()}")
    return found


def communication_of_even_shards() -> int:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    with CommDebugMode() as counted:
        F.mse_loss(sharded, sharded * 2)
    return counted.get_total_counts()


class MeanLossTest(unittest.TestCase):
    def test_values(self) -> None:
        self.assertEqual(ranks.run(2, lambda rank: wrong())[0], [])

    def test_even_shards_need_no_communication(self) -> None:
        self.assertEqual(ranks.run(2, lambda rank: communication_of_even_shards()), [0, 0])


if __name__ == "__main__":
    unittest.main()
