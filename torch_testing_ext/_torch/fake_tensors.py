"""The cache of what operators do with fake tensors, which all tests of a process share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def fake_tensor_mode() -> Any:
    """`FakeTensorMode`, with `cache`, `cache_bypasses`, `cache_hits` and `cache_misses`: torch 2.11 to 2.15."""
    return sys.modules["torch._subclasses.fake_tensor"].FakeTensorMode


@contextmanager
def untouched_cache() -> Iterator[None]:
    """Leave the cache and its counters as they were."""
    mode = fake_tensor_mode()
    keys, hits, misses, bypasses = set(mode.cache), mode.cache_hits, mode.cache_misses, dict(mode.cache_bypasses)
    try:
        yield
    finally:
        for key in set(mode.cache) - keys:
            del mode.cache[key]
        mode.cache_hits, mode.cache_misses = hits, misses
        mode.cache_bypasses.clear()
        mode.cache_bypasses.update(bypasses)
