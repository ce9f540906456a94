"""DTensor: a lookup in an embedding sharded by rows fails in a rank that holds no row, and the others wait for it.

Seen on torch 2.13.0, 2.14.1 and 2.15.0, on CPU. With four rows over three ranks the last rank has none, and its lookup
raises "index_select(): self indexing axis dim should be positive", while the others wait for it in the all-reduce. With
fewer rows than ranks, DTensor takes another path, which works. Found by
test/distributed/properties/test_tp_properties.py, with five rows over four ranks.

Run this file: it prints what the last rank got, and exits with 1 if that was an error.
"""

import os
import signal
import sys
import tempfile

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
        return f"error: {error}"


def start_another(rank: int, file: str) -> int:
    pid = os.fork()
    if pid == 0:
        look_up(rank, file)
        os._exit(0)
    return pid


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        others = [start_another(rank, f"{directory}/store") for rank in range(RANKS - 1)]
        result = look_up(RANKS - 1, f"{directory}/store")
    print(f"rank {RANKS - 1}: {result}", flush=True)
    for pid in others:
        os.kill(pid, signal.SIGKILL)  # they may wait forever
        os.waitpid(pid, 0)
    sys.exit(result.startswith("error"))
