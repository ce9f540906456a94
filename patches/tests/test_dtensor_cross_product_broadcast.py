"""Cross products of DTensors of which one is broadcast."""

import itertools
import unittest

import ranks
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PLACEMENTS = (Replicate(), Shard(0), Shard(1))
SHAPES = (((1, 3), (4, 3)), ((5, 3), (1, 3)), ((5, 3), (5, 3)), ((1, 3), (1, 3)), ((3, 1), (3, 4)))


def wrong() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for shapes, placements in itertools.product(SHAPES, itertools.product(PLACEMENTS, PLACEMENTS)):
        full = [torch.arange(float(shape[0] * shape[1])).view(shape) % 5 + index for index, shape in enumerate(shapes)]
        dim = shapes[0].index(3)
        sharded = [
            distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
            for tensor, placement in zip(full, placements, strict=True)
        ]
        local = torch.linalg.cross(*sharded, dim=dim)
        wanted = torch.linalg.cross(*full, dim=dim)
        expected = distribute_tensor(wanted, mesh, local.placements, src_data_rank=None)
        if local.to_local().shape != expected.to_local().shape or not local.full_tensor().equal(wanted):
            found.append(f"{shapes} as {placements}")
    return found


class CrossProductTest(unittest.TestCase):
    def test_values(self) -> None:
        self.assertEqual(ranks.run(2, lambda rank: wrong()), [[], []])


if __name__ == "__main__":
    unittest.main()
