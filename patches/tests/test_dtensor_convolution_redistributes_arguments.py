"""Convolutions of DTensors with any placements, forward and backward."""

import itertools
import unittest

import ranks
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

REPLICATE, FIRST, SECOND = Replicate(), Shard(0), Shard(1)


def arguments(dims: int) -> list[torch.Tensor]:
    images = torch.arange(2.0 * 2 * 4**dims).view(2, 2, *[4] * dims) % 7 - 3
    weights = torch.arange(4.0 * 2 * 3**dims).view(4, 2, *[3] * dims) % 5 - 2
    return [images, weights, torch.arange(4.0)]


def results(dims: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
    convolve = torch.nn.functional.conv1d if dims == 1 else torch.nn.functional.conv2d
    leaves = [tensor.requires_grad_() for tensor in given]
    output = convolve(*leaves)
    output.sum().backward()
    return [output, *[leaf.grad for leaf in leaves]]


def wrong() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    choices = ([REPLICATE, FIRST, SECOND], [REPLICATE, FIRST, SECOND], [REPLICATE, FIRST])
    for dims, placements in itertools.product((1, 2), itertools.product(*choices)):
        given = zip(arguments(dims), placements, strict=True)
        sharded = [distribute_tensor(tensor, mesh, [placement], src_data_rank=None) for tensor, placement in given]
        try:
            got = [result.full_tensor() for result in results(dims, sharded)]
        except RuntimeError as error:
            found.append(f"conv{dims}d of {placements}: {error}")
            continue
        wanted = results(dims, arguments(dims))
        if any(one.shape != other.shape or not one.equal(other) for one, other in zip(got, wanted, strict=True)):
            found.append(f"conv{dims}d of {placements} is wrong")
    return found


class ConvolutionTest(unittest.TestCase):
    def test_values(self) -> None:
        self.assertEqual(ranks.run(2, lambda rank: wrong())[0], [])


if __name__ == "__main__":
    unittest.main()
