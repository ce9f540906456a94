"""gloo: a process that created a DTensor aborts at exit, although it destroyed its group.

Seen on torch 2.13.0 and 2.15.0, more often on a busier machine (8 of 12 runs under torchrun). After the first
collective of a DTensor, torch keeps the default group alive beyond destroy_process_group(), which would otherwise wait
for gloo's threads. While the interpreter exits, one of these threads releases its reference to the last collective's
tensor, which Python still holds: the thread requests the GIL and is terminated inside a destructor, "terminate called
without an active exception". A pause before the exit avoids the abort.

Run this file: it runs 20 pairs of ranks (or as many as its argument says) with and without a pause, and prints how many
aborted.
"""

import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

TENSOR = torch.ones(40)


def rank(number: int, file: str, pause: float) -> None:
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor()
    for _ in range(20):
        dist.all_reduce(TENSOR)
    dist.destroy_process_group()
    time.sleep(pause)


def aborted(pause: str) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, f"{directory}/store", pause]
        ranks = [subprocess.Popen([*command, str(number)], stderr=subprocess.DEVNULL) for number in range(2)]
        return any(code != 0 for code in [process.wait() for process in ranks])


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    if len(sys.argv) == 4:
        rank(int(sys.argv[3]), sys.argv[1], float(sys.argv[2]))
    else:
        pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
        for pause in ("0", "0.002"):
            print(f"pause of {pause} s: {sum(aborted(pause) for _ in range(pairs))} of {pairs} aborted", flush=True)
