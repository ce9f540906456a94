"""Process groups of plain torch in this process."""

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def world_of_one() -> None:
    """Make a default group of gloo with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def fake_world(size: int = 4, rank: int = 0) -> None:
    """Make a default group that does not communicate."""
    from torch_testing_ext._torch.groups import dataless_groups

    dataless_groups.register_fake_backend()
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)


def two_groups(timeout: float = 10.0) -> list[Any]:
    """Both ends of a group of gloo with two ranks, in this process."""
    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups
