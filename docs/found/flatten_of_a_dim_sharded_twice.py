"""DTensor: flatten accepts a dim that two mesh dims shard unevenly, and then fails in some ranks only.

Two rows over a mesh of shape (1, 4), with both mesh dims sharding the rows: the check for uneven shards, which refuses
the same tensor on a mesh of shape (4,) in every rank, looks at the first mesh dim alone. Ranks then view their parts in
a shape that does not fit them: "shape '[2, 3]' is invalid for input of size 9". The last rank, whose part happens to
fit, goes on, and waits for the others in the next collective. The same goes for reshape, view, and what uses them, such
as linear_cross_entropy.

Seen on torch 2.11 to 2.15. Found by test/distributed/properties/test_dtensor_opinfo_properties.py.

Run this file: it prints what rank 0 got, and exits with 1 if its part did not fit.
"""

import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 4


def flatten(rank: int, file: str) -> str:
    dist.init_process_group("gloo", store=dist.FileStore(file, RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (1, RANKS))
    sharded = distribute_tensor(torch.ones(2, 3, 3), mesh, [Shard(0), Shard(0)], src_data_rank=None)
    try:
        return f"{sharded.flatten(0, 1).shape}"
    except RuntimeError as error:
        if "is invalid for input of size" not in str(error):
            raise
        return f"error: {error}"


def start_another(rank: int, file: str) -> BaseProcess:
    process = get_context("fork").Process(target=flatten, args=(rank, file), daemon=True)
    process.start()
    return process


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        others = [start_another(rank, f"{directory}/store") for rank in range(1, RANKS)]
        result = flatten(0, f"{directory}/store")
    print(f"rank 0: {result}", flush=True)
    for process in others:
        process.kill()  # it may wait forever
        process.join()
    sys.exit("is invalid for input of size" in result)
