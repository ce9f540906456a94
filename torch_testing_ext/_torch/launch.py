"""What starting, watching and leaving ranks needs of torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def flight_recorder() -> str:
    """What collectives this process has enqueued, as the flight recorder's JSON; "" where torch has none.

    `_dump_fr_trace_json` since torch 2.8; gloo records since 2.9, on CPU too. Seen on 2.13 and 2.15.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    trace = json.loads(dump())
    trace["entries"] = [entry for entry in trace.get("entries", []) if entry.get("time_created_ns", 0) > _warm_until]
    return json.dumps(trace)


# What the flight recorder has from before this moment is the warm-up's.
_warm_until = 0


def warm_up() -> None:
    """Do once in the zygote what every rank does first: seed, and a gloo group of one. What it initialises, and
    the pages it writes, the ranks then share. The process has one thread again afterwards. Whoever is forked off a
    process that did it has it done."""
    global _warm_until
    import torch.distributed as dist

    if _warm_until or not dist.is_available() or not dist.is_gloo_available() or dist.is_initialized():
        return
    torch.manual_seed(torch.initial_seed())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    _warm_until = time.time_ns()


# Backends whose destructors would wait for their peers; a rank that is about to leave keeps them instead.
_kept: list[Any] = []


def destroy_process_group() -> None:
    """Like `torch.distributed.destroy_process_group()`, without gloo's wait of 10 ms a connection.

    The groups' Python state goes, their backends stay until the process ends: right for a rank at its end.
    `_world.pg_map`: all versions. Groups with other backends than gloo are torn down in full.
    """
    import torch.distributed as dist

    if only_gloo():
        _kept.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def only_gloo() -> bool:
    """Have all process groups of this process nothing but gloo backends? `_world.pg_map`: all versions."""
    import torch.distributed as dist

    names = {backend for backend, _ in dist.distributed_c10d._world.pg_map.values()}
    kinds = {part.rpartition(":")[2] for name in names for part in str(name).split(",")}
    return kinds <= {"gloo"}


def wait_without_end() -> None:
    """Make one day the default time-out of process groups made from now on: a rank is being debugged.

    `_get_default_timeout`, all versions.
    """
    from datetime import timedelta

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
    """The class of the groups that communicate with nobody: 2.11 to 2.15."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup


def register_fake_backend() -> None:
    """Make backend="fake" give a group that communicates with nobody. `FakeProcessGroup._create_internal` since
    2.10; before, its constructor. Registering twice is harmless."""
    import torch.distributed as dist

    cls = fake_process_group()
    create: Callable[..., Any] = getattr(cls, "_create_internal", cls)

    def make(common: Any, options: Any) -> Any:
        return create(common.group_rank, common.group_size, options)

    dist.Backend.register_backend("fake", make, extended_api=True, devices=["cpu", "cuda", "hpu", "xpu"])
