"""DTensor: if a partial sum is filled with a value in place, the result is that value times the number of ranks.

`fill_` writes the value into every rank's part and leaves the placement as it is, so that the parts are added up later.
The same goes for functions that fill a new tensor like a given one: so cosine_embedding_loss is wrong if features are
sharded. Of other in-place functions, torch refuses those that would have to change the placement.

Seen on torch 2.11 to 2.15. Found by test/distributed/properties/test_dtensor_opinfo_properties.py. Near:
pytorch/pytorch#163193.

Run this file: it prints what torch returns and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial


def fill(rank: int, file: str) -> tuple[float, float]:
    """Return the result for a DTensor and for a plain tensor."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    dist.barrier()  # no rank leaves before all have connected
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.tensor(5.0), mesh, [Partial()])
    try:
        return partial.fill_(1.0).full_tensor().item(), torch.tensor(10.0).fill_(1.0).item()
    except RuntimeError as error:
        if "placement" not in str(error):
            raise
        print(f"rank {rank}: {error}", flush=True)
        return 1.0, 1.0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=fill, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        got, right = fill(0, f"{directory}/store")
        other.join()
    print(f"torch returns {got}, and {right} is right", flush=True)
    sys.exit(got != right)
