"""Hooks on the methods of stores."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch_testing_ext._torch.torch_frames import is_of_torch

_on_store: Callable[[str, bool], None] | None = None
_original_stores: dict[str, Any] = {}  # while they are replaced


def watch_stores(on_store: Callable[[str, bool], None] | None, names: Iterable[str] = ()) -> None:
    """Call `on_store(name, is_over)` around each of these methods of a store, if code outside of torch calls it."""
    global _on_store
    _on_store = on_store
    import torch.distributed as dist

    store: Any = dist.Store  # type: ignore[attr-defined, unused-ignore]  # from C++
    if on_store is None:
        for name, method in _original_stores.items():
            setattr(store, name, method)
        _original_stores.clear()
    elif not _original_stores:
        for name in names:
            if name in vars(store):
                _original_stores[name] = vars(store)[name]
                setattr(store, name, _watched_store(name, getattr(store, name)))


def _watched_store(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_store = _on_store
        if on_store is None or is_of_torch(sys._getframe(1).f_code.co_filename):
            return method(*args, **kwargs)
        on_store(name, False)
        result = method(*args, **kwargs)
        on_store(name, True)
        return result

    return call
