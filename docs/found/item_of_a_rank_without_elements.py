"""DTensor: item() of a sharded tensor of one element raises in each rank that has none of it.

The operator behind it, `_local_scalar_dense`, reads the local part, of which such a rank has none. The rank that holds
the element gets it. So a loss that is a shard ends the training in all ranks but one, and the last one waits for the
others in its next collective.

Seen on torch 2.11 to 2.15. Found by test/distributed/properties/test_dtensor_opinfo_properties.py.

Run this file: it prints what torch does and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def item(rank: int, file: str) -> tuple[float | str, float]:
    """Return the result, or the error, for a DTensor, and the result for a plain tensor."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    dist.barrier()  # no rank leaves before all have connected
    mesh = init_device_mesh("cpu", (2,))
    full = torch.tensor([3.0])
    sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    try:
        return sharded.item(), full.item()
    except RuntimeError as error:
        if "Empty tensor not supported" not in str(error):
            raise
        return f"{type(error).__name__}: {error}", full.item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=item, args=(0, f"{directory}/store"), daemon=True)
        other.start()
        got, right = item(1, f"{directory}/store")
        other.join()
    print(f"torch returns {got}, and {right} is right", flush=True)
    sys.exit(got != right)
