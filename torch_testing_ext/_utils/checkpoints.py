"""Decorators for tests of checkpoints."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def with_temp_dir(func: Callable[..., Any] | None = None) -> Any:
    """Run a test method with `self.temp_dir`: an empty directory, the same for all ranks, that goes when all are done.

    To stand below `with_comms`: the ranks agree about it through their group. Without one, each caller has its own.
    """
    assert func is not None, "with_temp_dir takes no arguments: write @with_temp_dir"

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        self.temp_dir = _common_directory()
        try:
            func(self, *args, **kwargs)
        except BaseException:
            # The others may never come to meet us, and what goes wrong in waiting for them is not the news.
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
    made = [tempfile.mkdtemp() if _is_owner() else ""]
    if dist.is_initialized():
        try:
            dist.broadcast_object_list(made)
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(made[0])
            raise
    return made[0]


def with_checkpoint_logging(
    func: Callable[..., Any] | None = None,
    logger_name: str = "torch.distributed.checkpoint",
    level: int = logging.INFO,
) -> Any:
    """Run a test method while a logger, that of checkpoints unless told otherwise, lets messages of `level` pass."""
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
