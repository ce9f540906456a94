"""DTensor: a Fourier transform fails in a rank that holds no row, and the other ranks wait for it.

With five rows over four ranks, two to a rank, the last rank has none. torch.fft.fft with MKL raises "Inconsistent
configuration parameters" for a tensor without elements. The other ranks have their answer, and wait in the next
collective. The same goes for all 18 transforms of torch.fft.

Seen on torch 2.12 to 2.14, on CPU; 2.15 is right, and 2.11 has no rule for transforms: it refuses. Found by
test/distributed/properties/test_dtensor_opinfo_properties.py. Its cause is pytorch/pytorch#174984.

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

RANKS, ROWS = 4, 5


def transform(rank: int, file: str) -> str:
    dist.init_process_group("gloo", store=dist.FileStore(file, RANKS), rank=rank, world_size=RANKS)
    dist.barrier()  # no rank leaves before all have connected
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(torch.ones(ROWS, 4), mesh, [Shard(0)], src_data_rank=None)
    try:
        return f"{torch.fft.fft(sharded, dim=1).full_tensor().tolist()}"
    except RuntimeError as error:
        if "Inconsistent configuration" not in str(error):
            raise
        return f"error: {error}"


def start_another(rank: int, file: str) -> BaseProcess:
    process = get_context("fork").Process(target=transform, args=(rank, file), daemon=True)
    process.start()
    return process


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        others = [start_another(rank, f"{directory}/store") for rank in range(RANKS - 1)]
        result = transform(RANKS - 1, f"{directory}/store")
    print(f"rank {RANKS - 1}: {result}", flush=True)
    for process in others:
        process.kill()  # it may wait forever
        process.join()
    sys.exit("Inconsistent configuration" in result)
