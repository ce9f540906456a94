"""Runs a function in several ranks over gloo, with nothing but torch: these tests judge torch's own test kit."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


TIMEOUT = timedelta(seconds=15)


def run(size: int, function: Callable[[int], Any]) -> list[Any]:
    """The results of `function(rank)`, by rank. Raises RuntimeError if a rank failed."""
    with tempfile.TemporaryDirectory() as directory:
        pids = [_fork(rank, size, directory, function) for rank in range(size)]
        for pid in pids:
            os.waitpid(pid, 0)
        results = [_result(f"{directory}/rank{rank}") for rank in range(size)]
    failed = [
        f"rank {rank}: {error}" for rank, (error, _) in enumerate(results) if error
    ]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in results]


def _fork(rank: int, size: int, directory: str, function: Callable[[int], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    error, value = "", None
    try:
        store = dist.FileStore(f"{directory}/store", size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
        )
        value = function(rank)
    except BaseException:
        error = traceback.format_exc()
    with open(f"{directory}/rank{rank}", "wb") as file:
        pickle.dump((error, value), file)
    os._exit(0)


def _result(path: str) -> tuple[str, Any]:
    if not os.path.exists(path):
        return "it died without a result", None
    with open(path, "rb") as file:
        result: tuple[str, Any] = pickle.load(file)
    return result
