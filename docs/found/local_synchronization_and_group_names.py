"""new_group: after a group with use_local_synchronization, ranks give the next group different names, and wait in vain.

Only the members of such a group call new_group. Groups without this option are numbered, and that number counts groups
of both kinds. So the members are one ahead of the other ranks, and the next group of all has another name in them.

Seen on torch 2.14 and 2.15; 2.11 to 2.13 number only groups without the option. Found while
test/distributed/properties/test_functional_collectives_properties.py was written, which leaves the option out. Known
as pytorch/pytorch#173608, which is open.

Run this file: it prints what became of the second group, and exits with 1 if that timed out.
"""

import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.synchronize import Event

import torch.distributed as dist

CONTEXT = get_context("fork")


def create(rank: int, file: str) -> bool:
    """Create a group of rank 0 alone, then one of both ranks; return whether that works."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    try:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    except RuntimeError as error:
        if "timeout" not in str(error):
            raise
        print(f"rank {rank}: {error}", flush=True)
        return False
    print(f"rank {rank}: {group.group_name}", flush=True)
    return True


def create_and_stay(file: str, is_over: Event) -> None:
    """Be rank 1 until rank 0 is done: it may still be connecting to this rank."""
    create(1, file)
    is_over.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        is_over = CONTEXT.Event()
        other = CONTEXT.Process(target=create_and_stay, args=(f"{directory}/store", is_over), daemon=True)
        other.start()
        right = create(0, f"{directory}/store")
        is_over.set()
        other.join()
    sys.exit(not right)
