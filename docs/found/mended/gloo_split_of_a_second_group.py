"""gloo: split_group crashes the process, unless it splits the first group that the process has ever made.

gloo numbers the groups of a process in C++. Only of the first one does the backend know that, without a list of ranks,
the members are all ranks; of a later default group, `split_group` reads from an empty list. A process that is forked
from one that has made a group goes on counting, so its very first group is affected, too.

Seen on torch 2.11 to 2.13, not on 2.14 and 2.15. pytorch/pytorch#191949 describes the cause, near
pytorch/pytorch#192106. Found by running PyTorch's test_dist2.py in ranks that were forked from a process that had made
a group, which ours no longer are.

Run this file: it prints how the process ended, and exits with 1 if it crashed.
"""

import sys
from datetime import timedelta
from multiprocessing import get_context

import torch.distributed as dist


def split_a_second_group() -> None:
    """Make a group, destroy it, make another one, and split that."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.split_group([0], timedelta(seconds=10))
    assert group is not None
    print(f"a group of {group.size()}", flush=True)


if __name__ == "__main__":
    process = get_context("fork").Process(target=split_a_second_group, daemon=True)
    process.start()
    process.join()
    code = process.exitcode
    assert code is not None
    print(f"killed by signal {-code}" if code < 0 else f"exited with {code}")
    sys.exit(code < 0)
