"""Process groups in torch, as starting, watching and leaving ranks needs them."""

import pickle
from datetime import timedelta
from typing import Any

import torch

from torch_testing_ext._torch import replacing


def made_groups_before() -> bool:
    """Whether this process, or one that it was forked from, has ever made a process group of gloo or NCCL.

    Their backends number the groups of a process in C++, and forked processes go on counting. `pg_config` of
    `_dump_fr_trace`: 2.11 to 2.15.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
    return dump is not None and bool(pickle.loads(dump(False, False, False)).get("pg_config"))


def only_gloo() -> bool:
    """Whether all process groups of this process have only gloo backends. `_world.pg_map`: all versions."""
    import torch.distributed as dist

    names = {backend for backend, _ in dist.distributed_c10d._world.pg_map.values()}
    kinds = {part.rpartition(":")[2] for name in names for part in str(name).split(",")}
    return kinds <= {"gloo"}


def wait_without_end() -> None:
    """Set the default time-out of process groups made from now on to one day: a rank is being debugged.

    `_get_default_timeout`, all versions.
    """
    replacing.replace_for_good("time-outs of groups", lambda name, original: lambda backend: timedelta(days=1))


def abort_process_groups() -> None:
    """Abort all process groups of this process, including the collectives that run in them.

    `_abort_process_group`: 2.6 to 2.15. Backends without an abort (gloo) stay as they are.
    """
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def launcher_store(host: str, port: int, makes_it: bool, timeout: float) -> Any:
    """Return the store of a launch on several machines. `makes_it`: this process does; otherwise, it is there."""
    import torch.distributed as dist

    c10d: Any = dist  # its type stubs lack what comes from C++
    limit = timedelta(seconds=timeout)
    # A group that the user makes by `env://` in this process may share it.
    store = c10d.TCPStore(host, port, None, makes_it, limit, wait_for_workers=False, multi_tenant=True)
    return c10d.PrefixStore("torch_testing_ext", store)
