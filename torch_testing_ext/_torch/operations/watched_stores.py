"""Hooks on the methods of stores."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch_testing_ext._torch.replacing import Hooks
from torch_testing_ext._torch.torch_frames import is_of_torch

OnStore = Callable[[str, bool], None]


# A listener is called as `on_store(name, is_over)` around each method of a store, if code outside of torch calls it.
hooks: Hooks[OnStore] = Hooks(lambda _: {"calls of stores": _watched_store})


def _watched_store(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        listeners = () if is_of_torch(sys._getframe(1).f_code.co_filename) else hooks.listeners
        for on_store in listeners:
            on_store(name, False)
        result = method(*args, **kwargs)
        for on_store in listeners:
            on_store(name, True)
        return result

    return call
