"""DTensor: a cross product that broadcasts one row over several splits that row over the ranks, too.

Seen on torch 2.14 and 2.15; 2.12 and 2.13 are right, and 2.11 refuses: it has no rule for cross products. The dim of
size 1 is sharded like that of the other tensor. So one rank has the row, the others have none, and their part of the
result is empty or raises. Found by test/distributed/properties/test_dtensor_opinfo_properties.py.

Run this file: it prints what torch returns and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def cross(rank: int, file: str) -> tuple[int, int]:
    """Return the number of rows of the result on all ranks together, for DTensors and for plain tensors."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    row, rows = torch.tensor([[1.0, 2.0, 3.0]]), torch.eye(2, 3)
    sharded = [distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for tensor in (row, rows)]
    right = torch.linalg.cross(row, rows).size(0)
    try:
        result = torch.linalg.cross(*sharded)
    except NotImplementedError as error:
        print(f"rank {rank}: {error}", flush=True)
        return right, right
    local = torch.tensor(result.to_local().size(0))
    if result.placements[0].is_shard():
        dist.all_reduce(local)
    return int(local), right


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=cross, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        got, right = cross(0, f"{directory}/store")
        other.join()
    print(f"torch returns {got} rows, and {right} are right", flush=True)
    sys.exit(got != right)
