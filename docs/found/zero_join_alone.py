"""Join: with a ZeroRedundancyOptimizer as its first object, ranks with uneven inputs hang.

A rank that has joined shadows the others by calling the optimizer's step(), which also tells that the rank has not
joined: one all_reduce more than the others issue. It is only told for the first object of Join, so that the optimizer
after a DistributedDataParallel works, which torch's own tests have.

Seen on torch 2.11 to 2.15. Found when the sanitizer's tests of sound programs put it into Join alone.
Near: pytorch/pytorch#54318.

Run this file: it prints what became of both ranks, and exits with 1 if they timed out.
"""

import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer


def train(rank: int, file: str) -> bool:
    """Take a step more in rank 1 than in rank 0; return whether that works."""
    timeout = timedelta(seconds=3)
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2, timeout=timeout)
    model = torch.nn.Linear(4, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    try:
        with Join([optimizer]):
            for _ in range(1 + rank):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
    except RuntimeError as error:
        # Rank 0 waits for a collective that rank 1 does not issue, until one of them gives up and leaves.
        if not any(text in str(error) for text in ("Timed out", "timeout", "Connection closed")):
            raise
        print(f"rank {rank}: {error}", flush=True)
        return False
    print(f"rank {rank} has joined", flush=True)
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=train, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        right = train(0, f"{directory}/store")
        other.join()
    sys.exit(not right)
