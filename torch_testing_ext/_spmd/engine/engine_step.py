"""A step that the engine runs."""

import functools
import os
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch_testing_ext._utils.rank_traces import picture

from ..parallel_modes import DataParallel
from .engine_core import current_engine
from .engine_report import EngineReport


class EngineStep:
    """A train step whose state is data parallel. Calling it runs the user's Python."""

    def __init__(self, function: Callable[..., Any], mode: DataParallel) -> None:
        functools.update_wrapper(self, function)
        self.function, self.mode = function, mode
        self.name: str = getattr(function, "__name__", type(function).__name__)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return current_engine().call(self, self.mode, args, kwargs)

    def report(self) -> EngineReport:
        """Summarize the last call: what is averaged and gathered, in which buckets, and what runs whole."""
        return current_engine().report(self)

    def picture(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record the calls in a context of all ranks; rank 0 writes them to `path`, which Perfetto opens."""
        wire = current_engine().wire
        return picture(wire.rank, wire.gather_objects, path)
