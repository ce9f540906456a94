"""cumsum and its kin along a sharded dim, counted from either end."""

import unittest

import ranks
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard


def wrong() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(1.0, 13.0).view(4, 3)
    found = []
    for scan in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
        for sharded_dim in (0, 1):
            sharded = distribute_tensor(
                full, mesh, [Shard(sharded_dim)], src_data_rank=None
            )
            for dim in (-2, -1, 0, 1):
                if not torch.allclose(
                    scan(sharded, dim).full_tensor(), scan(full, dim)
                ):
                    found.append(
                        f"{scan.__name__} along {dim}, sharded on {sharded_dim}"
                    )
    return found


class ScanTest(unittest.TestCase):
    def test_values(self) -> None:
        self.assertEqual(ranks.run(2, lambda rank: wrong())[0], [])


if __name__ == "__main__":
    unittest.main()
