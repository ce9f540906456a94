"""Decorators for tests of checkpoints."""

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def with_temp_dir(func: Callable[..., Any] | None = None) -> Any:
    """Run a test method with `self.temp_dir`: an empty directory, common to all ranks, removed when all are done.

    Place it below `with_comms`: the ranks agree on the directory through their group. Without a group, each caller has
    a directory of its own.
    """
    assert func is not None, "with_temp_dir takes no arguments: write @with_temp_dir"

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        self.temp_dir = _common_directory()
        try:
            func(self, *args, **kwargs)
        except BaseException:
            # No barrier: other ranks may never reach it, and an error in it would hide the test's own.
            if _is_owner():
                shutil.rmtree(self.temp_dir, ignore_errors=True)
            raise
        if dist.is_initialized():
            dist.barrier()
        if _is_owner():
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    return wrapper


def _is_owner() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _common_directory() -> str:
    directory = [tempfile.mkdtemp() if _is_owner() else ""]
    if dist.is_initialized():
        try:
            dist.broadcast_object_list(directory)
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(directory[0])
            raise
    return directory[0]


def with_checkpoint_logging(
    func: Callable[..., Any] | None = None, logger_name: str = "torch.distributed.checkpoint", level: int = logging.INFO
) -> Any:
    """Run a test method with a logger, by default that of checkpoints, set to `level`."""
    assert func is not None, "write @with_checkpoint_logging, or with_checkpoint_logging(func, level=...)"

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        logger = logging.getLogger(logger_name)
        before = logger.level
        logger.setLevel(level)
        try:
            func(self, *args, **kwargs)
        finally:
            logger.setLevel(before)

    return wrapper
