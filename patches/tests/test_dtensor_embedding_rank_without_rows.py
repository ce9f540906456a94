"""Lookups in an embedding sharded by rows, when some ranks hold no row."""

import unittest

import ranks
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def wrong(size: int, rows: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(1.0, 1 + 2 * rows).view(rows, 2).requires_grad_()
    indices = torch.tensor([[0, rows - 1], [rows // 2, 0]])
    weight = distribute_tensor(full.detach(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    got = F.embedding(distribute_tensor(indices, mesh, [Replicate()], src_data_rank=None), weight)
    right = F.embedding(indices, full)
    got = got.full_tensor()
    (got * right.detach()).sum().backward()
    (right * right.detach()).sum().backward()
    found = [] if torch.equal(got, right) else [f"{rows} rows: {got.tolist()}"]
    gradient = weight.grad.full_tensor()
    return found if torch.equal(gradient, full.grad) else [*found, f"{rows} rows: gradient {gradient.tolist()}"]


class EmbeddingTest(unittest.TestCase):
    def test_two_ranks(self) -> None:
        self.assertEqual(ranks.run(2, lambda rank: [wrong(2, rows) for rows in (1, 2, 3)]), [[[]] * 3] * 2)

    def test_three_ranks(self) -> None:
        # The last rank holds none of four rows.
        self.assertEqual(ranks.run(3, lambda rank: [wrong(3, rows) for rows in (1, 2, 4, 5, 7)]), [[[]] * 5] * 3)


if __name__ == "__main__":
    unittest.main()
