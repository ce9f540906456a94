"""Hooks on the methods of stores."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch_testing_ext._torch.replacing import Replacement
from torch_testing_ext._torch.torch_frames import is_of_torch

OnStore = Callable[[str, bool], None]


class StoreHooks:
    """The hooks of this process. Without a listener, the methods of stores are as they were."""

    def __init__(self) -> None:
        self.on_store: OnStore | None = None
        # While somebody listens.
        self._replaced: list[Replacement] = []

    def tell(self, on_store: OnStore | None) -> None:
        """Call `on_store(name, is_over)` around each method of a store, if code outside of torch calls it."""
        self.on_store = on_store
        if on_store is None:
            while self._replaced:
                self._replaced.pop().undo()
        elif not self._replaced:
            self._replaced.append(Replacement("calls of stores", _watched_store))


hooks = StoreHooks()


def _watched_store(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_store = hooks.on_store
        if on_store is None or is_of_torch(sys._getframe(1).f_code.co_filename):
            return method(*args, **kwargs)
        on_store(name, False)
        result = method(*args, **kwargs)
        on_store(name, True)
        return result

    return call
