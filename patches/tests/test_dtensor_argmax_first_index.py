"""argmax, argmin and the indices of max and min over sharded dims: the first of several equal elements."""

import itertools
import unittest

import ranks
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

# Few values, so that most are equal.
TENSORS = (
    torch.tensor([[0.0, 5.0], [5.0, 0.0]]),
    torch.tensor([[1.0, 2.0, 2.0, 0.0], [2.0, 0.0, 1.0, 2.0], [2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0]]),
    torch.tensor([[0.0, float("nan")], [float("nan"), 3.0]]),
    torch.tensor([[3, 3, 1, 1], [1, 3, 3, 3]]),
)
OPERATIONS = {
    "argmax": lambda t: t.argmax(),
    "argmin": lambda t: t.argmin(),
    "argmax(0)": lambda t: t.argmax(0),
    "argmin(1, keepdim)": lambda t: t.argmin(1, keepdim=True),
    "max(0)": lambda t: t.max(0).indices,
    "min(1)": lambda t: t.min(1).indices,
}


def wrong(shape: tuple[int, ...], placements: list[tuple[Placement, ...]]) -> list[str]:
    mesh = init_device_mesh("cpu", shape)
    found = []
    for tensor, (name, operation), placement in itertools.product(TENSORS, OPERATIONS.items(), placements):
        got = operation(distribute_tensor(tensor, mesh, placement, src_data_rank=None)).full_tensor()
        if got.tolist() != operation(tensor).tolist():
            found.append(f"{name} of {tensor.tolist()} as {placement}: {got.tolist()}")
    return found


class ArgmaxTest(unittest.TestCase):
    def test_one_mesh_dim(self) -> None:
        placements: list[tuple[Placement, ...]] = [(Shard(0),), (Shard(1),), (Replicate(),)]
        self.assertEqual(ranks.run(2, lambda rank: wrong((2,), placements))[0], [])

    def test_two_mesh_dims(self) -> None:
        placements: list[tuple[Placement, ...]] = [(Shard(1), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1))]
        self.assertEqual(ranks.run(4, lambda rank: wrong((2, 2), placements))[0], [])


if __name__ == "__main__":
    unittest.main()
