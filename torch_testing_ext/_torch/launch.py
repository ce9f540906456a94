"""The parts of torch that starting, watching and leaving ranks need."""

import os
import pickle
import re
import sys
from datetime import timedelta
from typing import Any

import torch


def made_groups_before() -> bool:
    """Has this process, or one that it was forked from, ever made a process group of gloo or NCCL?

    Their backends number the groups of a process in C++, and forked processes go on counting. `pg_config` of
    `_dump_fr_trace`: 2.11 to 2.15.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
    return dump is not None and bool(pickle.loads(dump(False, False, False)).get("pg_config"))


def only_gloo() -> bool:
    """Do all process groups of this process have only gloo backends? `_world.pg_map`: all versions."""
    import torch.distributed as dist

    names = {backend for backend, _ in dist.distributed_c10d._world.pg_map.values()}
    kinds = {part.rpartition(":")[2] for name in names for part in str(name).split(",")}
    return kinds <= {"gloo"}


def wait_without_end() -> None:
    """Set the default time-out of process groups made from now on to one day: a rank is being debugged.

    `_get_default_timeout`, all versions.
    """
    import torch.distributed as dist

    dist.distributed_c10d._get_default_timeout = lambda backend: timedelta(days=1)


def reset_dynamo() -> None:
    """Forget what torch.compile has compiled, if it ran at all. `torch._dynamo.reset`, all versions."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def end_compile_workers() -> None:
    """End inductor's pool of compile processes, which the interpreter's tear-down would have ended.

    `torch._inductor.async_compile.shutdown_compile_workers`, all versions.
    """
    pool = sys.modules.get("torch._inductor.async_compile")
    if pool is not None:
        pool.shutdown_compile_workers()


def fake_process_group() -> Any:
    """The class of process groups that do not communicate: 2.11 to 2.15."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup


def register_fake_backend() -> None:
    """Register backend="fake", whose groups do not communicate. Registering twice is harmless.

    `FakeProcessGroup._create_internal`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    def make(common: Any, options: Any) -> Any:
        return fake_process_group()._create_internal(common.group_rank, common.group_size, options)

    dist.Backend.register_backend("fake", make, extended_api=True, devices=["cpu", "cuda", "hpu", "xpu"])


def abort_process_groups() -> None:
    """Abort all process groups of this process, including the collectives that run in them.

    `_abort_process_group`: 2.6 to 2.15. Backends without an abort (gloo) stay as they are.
    """
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def launcher_store(rank: int, timeout: float) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT: torchrun's agent has one; otherwise, rank 0 makes it."""
    import torch.distributed as dist

    c10d: Any = dist  # its type stubs lack what comes from C++
    has_one = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = c10d.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not has_one,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return c10d.PrefixStore("torch_testing_ext", store)


# -- whose fault an error is: most errors of collectives are a RuntimeError, and only the message tells them apart. All
# of 2.11 to 2.15.

# The process at the other end of a collective or a store has gone.
LOST_PEER = re.compile(
    # gloo's pairs and TCPStore's sockets, with the system's words for the errno
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|connection lost"
    # NCCL, as ProcessGroupNCCL reports it
    r"|remote process exited|NCCL.*(remote error|communicator was aborted)"
    # TCPStore, and the exchange of NCCL's unique id over it
    r"|recvValue failed|sendBytes failed|socket (timeout|error)|failed to recv",
    re.IGNORECASE,
)
# A wait for other ranks was given up, by gloo, TCPStore or HashStore ("Wait timeout").
GAVE_UP = re.compile(r"timed out waiting|timed out after .* waiting|wait timeout", re.IGNORECASE)
# A store or a backend could not listen.
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
