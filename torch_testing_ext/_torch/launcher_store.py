"""The store at which a launcher lets its ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_dist: Any = dist  # its type stubs lack what comes from C++


def connect(rank: int, timeout: float) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT: torchrun's agent has one; otherwise, rank 0 makes it."""
    has_one = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not has_one,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return _dist.PrefixStore("torch_testing_ext", store)
