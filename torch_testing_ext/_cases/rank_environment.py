"""The variables by which frameworks find their ranks, as a launcher such as torchrun sets them."""

from __future__ import annotations

import os

from torch_testing_ext._process import system


def common(world_size: int, port: int) -> dict[str, str]:
    """Those that are the same in all ranks. `port`: where rank 0 may listen."""
    size = str(world_size)
    own = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Otherwise `env://` would look for the store of a launcher that has started this process.
    own |= dict.fromkeys((name for name in os.environ if name.startswith("TORCHELASTIC_USE_")), "False")
    return {**system.for_gloo(), **own}


def become(rank: int) -> None:
    """In a rank: set those that are its own."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
