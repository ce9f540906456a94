"""Stores, gloo devices and shared directories, as PyTorch's older distributed suites create them."""

import os
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch

from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._machine.ports import find_free_port, retry_on_connect_failures

from .suite_checks import c10d

# Its type stubs lack what comes from C++.
FILE_SCHEMA = "file:///" if sys.platform == "win32" else "file://"


@retry_on_connect_failures
def create_tcp_store(
    addr: str = "localhost",
    world_size: int = 1,
    is_master: bool = True,
    timeout: timedelta = timedelta(minutes=5),
    wait_for_workers: bool = True,
    jit_class: bool = False,
    use_libuv: bool = True,
) -> Any:
    """Create a TCPStore on a free port; retry where another process takes the port first."""
    port = find_free_port()
    if jit_class:
        milliseconds = int(timeout / timedelta(milliseconds=1))
        return torch.classes.dist_c10d.TCPStore(addr, port, world_size, is_master, milliseconds)
    return c10d.TCPStore(
        addr, port, world_size, is_master, timeout, wait_for_workers=wait_for_workers, use_libuv=use_libuv
    )


def create_device(interface: str | None = None, lazy_init: bool = False) -> Any:
    """Create a gloo device on an interface, or on the loopback address."""
    if sys.platform == "win32" or interface is None:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy_init)
    return c10d.ProcessGroupGloo.create_device(interface=interface, lazy_init=lazy_init)


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Map each rank to its devices: the one with its own number; none where there are fewer devices than ranks.

    Ranks that may share devices have one, too.
    """
    count, enough = accelerators.device_count(), accelerators.most_ranks() >= world_size
    return {rank: [device_sharing.device_of(rank, count)] if enough else [] for rank in range(world_size)}


tmp_dir: tempfile.TemporaryDirectory[str] | None = None


def initialize_temp_directories(init_method: str | None = None) -> None:
    """Create the directories that PyTorch's older suites share between ranks, and name them in the environment."""
    global tmp_dir
    tmp_dir = tempfile.TemporaryDirectory()
    for name in ("barrier", "test_dir", "init_dir"):
        os.mkdir(os.path.join(tmp_dir.name, name))
    os.environ["TEMP_DIR"] = tmp_dir.name
    shared = os.path.join(tmp_dir.name, "init_dir", "shared_init_file")
    os.environ["INIT_METHOD"] = FILE_SCHEMA + shared if init_method is None else init_method


def cleanup_temp_dir() -> None:
    if tmp_dir is not None:
        tmp_dir.cleanup()
