"""The functional permute_tensor, with a group given in different ways."""

import unittest
from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

SIZE = 3


def rotated(rank: int) -> list[list[Any]]:
    """What this rank gets from the one before it, in the world and in a group of the first two ranks."""
    world, first = dist.group.WORLD, dist.new_group([0, 1])
    found = [_rotated(rank, SIZE, way) for way in (world, world.group_name, [*range(SIZE)])]
    if rank < 2:
        found += [_rotated(rank, 2, way) for way in (first, first.group_name)]
    return found


def _rotated(rank: int, size: int, group: Any) -> list[float]:
    got = functional.permute_tensor(torch.full((2,), float(rank)), [(one + 1) % size for one in range(size)], group)
    return got.tolist()


class PermuteTest(unittest.TestCase):
    def test_each_way_to_name_a_group(self) -> None:
        world = [[[float((rank - 1) % SIZE)] * 2] * 3 for rank in range(SIZE)]
        first = [[[float(1 - rank)] * 2] * 2 for rank in range(2)]
        self.assertEqual(ranks.run(SIZE, rotated), [world[0] + first[0], world[1] + first[1], world[2]])


if __name__ == "__main__":
    unittest.main()
