"""Hooks on the methods of stores."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch_testing_ext._torch.replacing import Hooks, Replacement
from torch_testing_ext._torch.torch_frames import is_of_torch

OnStore = Callable[[str, bool], None]


# The listener is called as `on_store(name, is_over)` around each method of a store, if code outside of torch calls it.
hooks: Hooks[OnStore | None] = Hooks(None, lambda _: [Replacement("calls of stores", _watched_store)])


def _watched_store(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_store = hooks.listener
        if on_store is None or is_of_torch(sys._getframe(1).f_code.co_filename):
            return method(*args, **kwargs)
        on_store(name, False)
        result = method(*args, **kwargs)
        on_store(name, True)
        return result

    return call
