"""DTensor: a lookup in an embedding sharded by rows fails in a rank that holds no row, and the others wait for it.

Seen on torch 2.11 to 2.15, on CPU. With four rows over three ranks the last rank has none, and its lookup
raises "index_select(): self indexing axis dim should be positive", while the others wait for it in the all-reduce. With
fewer rows than ranks, DTensor takes another path, which works. Found by
test/distributed/properties/test_tp_properties.py, with five rows over four ranks.

Run this file: it prints what the last rank got, and exits with 1 if that was an error.
"""

import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS, ROWS = 3, 4


def look_up(rank: int, file: str) -> str:
    dist.init_process_group("gloo", store=dist.FileStore(file, RANKS), rank=rank, world_size=RANKS)
    dist.barrier()  # no rank leaves before all have connected
    mesh = init_device_mesh("cpu", (RANKS,))
    weight = distribute_tensor(torch.ones(ROWS, 2), mesh, [Shard(0)], src_data_rank=None)
    tokens = distribute_tensor(torch.zeros(1, dtype=torch.long), mesh, [Replicate()], src_data_rank=None)
    try:
        return f"{torch.nn.functional.embedding(tokens, weight).full_tensor().tolist()}"
    except RuntimeError as error:
        if "self indexing axis dim should be positive" not in str(error):
            raise
        return f"error: {error}"


def start_another(rank: int, file: str) -> BaseProcess:
    process = get_context("fork").Process(target=look_up, args=(rank, file), daemon=True)
    process.start()
    return process


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        others = [start_another(rank, f"{directory}/store") for rank in range(RANKS - 1)]
        result = look_up(RANKS - 1, f"{directory}/store")
    print(f"rank {RANKS - 1}: {result}", flush=True)
    for process in others:
        process.kill()  # it may wait forever
        process.join()
    sys.exit(result.startswith("error"))
