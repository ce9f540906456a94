"""The keywords of the mark that a class with DeepSpeed's names stands for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch_testing_ext._machine import accelerators

from .classes import DistributedExec


def keywords_for(
    cls: type[DistributedExec], size: int, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The keywords of the mark of a class for this number of ranks; explicit ones win."""
    init = cls.init or _init_of_deepspeed(cls.backend)
    keywords = {"backend": cls.backend, "timeout": cls.exec_timeout, "init": init, **given}
    if keywords.get("devices") is None:
        if cls.requires_cuda_env or accelerators.device_count() > 0:
            keywords["devices"] = size
        elif keywords["backend"] is None:
            keywords["devices"] = 0
    return keywords


def _init_of_deepspeed(backend: str | None) -> Callable[..., object] | None:
    """Return how DeepSpeed makes a group, which `deepspeed.comm` then knows, too; None if nothing has imported it."""
    deepspeed = sys.modules.get("deepspeed")
    init = getattr(deepspeed, "init_distributed", None)
    return None if init is None else _with(init, backend)


# Equal for all tests of a class, which may share their ranks.
@functools.cache
def _with(init: Callable[..., object], backend: str | None) -> Callable[..., object]:
    return functools.partial(init, backend)
