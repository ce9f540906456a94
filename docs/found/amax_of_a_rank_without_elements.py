"""DTensor: amax fails in a rank that holds no element, and the other ranks wait for it.

With two elements over three ranks the last rank has none, and its part raises "amax(): Expected reduction dim to be
specified", while the others wait for it in the all-reduce. The same goes for amin, max and min of all elements, argmax,
argmin, the norm of order inf, and cov with weights. Pooling fails likewise in a rank without channels:
adaptive_max_pool1d, 2d and 3d and, on torch 2.15.0, avg_pool3d and its kin. aminmax also does where torch shards it.

Seen on torch 2.11 to 2.15, on CPU. Found by test/distributed/properties/test_dtensor_opinfo_properties.py.

Run this file: it prints what the last rank got, and exits with 1 if that was an error.
"""

import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS, ELEMENTS = 3, 2


def find_largest(rank: int, file: str) -> str:
    dist.init_process_group("gloo", store=dist.FileStore(file, RANKS), rank=rank, world_size=RANKS)
    dist.barrier()  # no rank leaves before all have connected
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(torch.ones(ELEMENTS), mesh, [Shard(0)], src_data_rank=None)
    try:
        return f"{sharded.amax().full_tensor().item()}"
    except RuntimeError as error:
        if "Expected reduction dim to be specified" not in str(error):
            raise
        return f"error: {error}"


def start_another(rank: int, file: str) -> BaseProcess:
    process = get_context("fork").Process(target=find_largest, args=(rank, file), daemon=True)
    process.start()
    return process


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        others = [start_another(rank, f"{directory}/store") for rank in range(RANKS - 1)]
        result = find_largest(RANKS - 1, f"{directory}/store")
    print(f"rank {RANKS - 1}: {result}", flush=True)
    for process in others:
        process.kill()  # it may wait forever
        process.join()
    sys.exit(result.startswith("error"))
