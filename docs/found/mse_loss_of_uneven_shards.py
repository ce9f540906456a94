"""DTensor: the mean squared error is wrong if the shards are uneven.

Seen on torch 2.11 to 2.15. It is the mean of the ranks' means, in which an element of a short shard has
more weight. The same goes for huber_loss, smooth_l1_loss, binary_cross_entropy (also with logits) and
soft_margin_loss. Found by test/distributed/properties/test_dtensor_ops_properties.py. Near: pytorch/pytorch#162692,
pytorch/pytorch#163241, pytorch/pytorch#185167.

Run this file: it prints what torch returns and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def mse_loss(rank: int, file: str) -> tuple[float, float]:
    """Return the result for a DTensor and for a plain tensor."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.tensor([0.0, 0.0, 3.0])
    sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    return F.mse_loss(sharded, sharded * 2).full_tensor().item(), F.mse_loss(full, full * 2).item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=mse_loss, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        got, right = mse_loss(0, f"{directory}/store")
        other.join()
    print(f"torch returns {got}, and {right} is right", flush=True)
    sys.exit(got != right)
