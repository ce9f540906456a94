"""new_group: after a group with use_local_synchronization, ranks give the next group different names, and wait in vain.

Only the members of such a group call new_group. Groups without this option are numbered, and that number counts groups
of both kinds. So the members are one ahead of the other ranks, and the next group of all has another name in them.

Seen on torch 2.14.0 and 2.15.0; 2.11.0 and 2.13.0 number only groups without the option. Found while
test/distributed/properties/test_functional_collectives_properties.py was written, which leaves the option out.

Run this file: it prints what became of the second group, and exits with 1 if that timed out.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch.distributed as dist


def create(rank: int, file: str) -> bool:
    """Create a group of rank 0 alone, then one of both ranks; return whether that works."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    try:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
        return False
    print(f"rank {rank}: {group.group_name}", flush=True)
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        ended, ends = os.pipe()
        if os.fork() == 0:
            os.close(ends)
            create(1, f"{directory}/store")
            os.read(ended, 1)  # until rank 0 is done: it may still be connecting to this rank
            os._exit(0)
        right = create(0, f"{directory}/store")
        os.close(ends)
        os.wait()
    sys.exit(not right)
