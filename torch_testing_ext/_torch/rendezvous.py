"""How ranks meet in a FileStore without its steps of 10 ms.

A rank that creates a gloo group writes its address into the store and reads those of its peers. A FileStore looks for a
key that is not there yet every 10 ms. Nearly always, the peer needs less than a millisecond more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# A peer that is later than this is waited for in the store's own way, and time-outs are the store's own.
PROMPT_SECONDS = 0.3
# A store in Python takes longer to answer, which more ranks would notice more than a step: each asks for each.
MOST_RANKS = 32
_FIRST_STEP, _LAST_STEP = 50e-6, 5e-3

_c10d: Any = dist  # its type stubs lack what comes from C++


class PromptStore(_c10d.Store):  # type: ignore[misc, unused-ignore]
    """Passes everything on to a store over a FileStore, but first waits for missing keys in short steps."""

    def __init__(self, store: Any, path: str):
        super().__init__()
        self._store = store
        self._path = path

    def get(self, key: str) -> bytes:
        self._await([key])
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        if not self._await(keys):
            self._store.wait(keys, *timeout)

    def _await(self, keys: list[str]) -> bool:
        """Wait a short while for the keys; are they there?"""
        began = time.monotonic()
        while True:
            size = self._size()  # the file grows with every change: it need not be read before
            if self._store.check(keys):
                return True
            while self._size() == size:
                waited = time.monotonic() - began
                if waited > PROMPT_SECONDS:
                    return False
                # Longer steps the longer it takes: many ranks that wait must not keep the others from coming.
                time.sleep(min(max(_FIRST_STEP, waited / 8), _LAST_STEP))

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return -1

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        count: int = self._store.add(key, amount)
        return count

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        return value

    def deleteKey(self, key: str) -> bool:  # C++ looks for this name
        return bool(self._store.delete_key(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def clone(self) -> Any:
        return self._store.clone()

    def has_extended_api(self) -> bool:
        return False  # a FileStore has none


@contextmanager
def prompt_rendezvous() -> Iterator[list[PromptStore]]:
    """Gloo groups that are created within meet promptly if their store is a FileStore.

    The stores that they are given instead are in the list: gloo needs them for as long as the groups live.
    `distributed_c10d.ProcessGroupGloo`, which creates gloo's backends: 2.11 to 2.15.
    """
    module: Any = dist.distributed_c10d
    real: Any = getattr(dist, "ProcessGroupGloo", None)
    if real is None or module.ProcessGroupGloo is not real or _connects_later():
        yield []  # not there, or a test has replaced it, or another thread creates a group
        return
    stores: list[PromptStore] = []

    class Meeting(type):
        def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            if size <= MOST_RANKS and (path := _path_of_file_store(store)):
                store = PromptStore(store, path)
                stores.append(store)
            return real(store, rank, size, *args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

    module.ProcessGroupGloo = Meeting("ProcessGroupGloo", (), {})
    try:
        yield stores
    finally:
        module.ProcessGroupGloo = real


def _connects_later() -> bool:
    """Does gloo make a connection when it is first used? It then needs its store for as long."""
    return bool(os.environ.get("TORCH_GLOO_LAZY_INIT"))


def _path_of_file_store(store: Any) -> str | None:
    """The path of the FileStore that is behind these prefixes; None if it is another store."""
    while isinstance(store, _c10d.PrefixStore):
        store = store.underlying_store
    return str(store.path) if isinstance(store, _c10d.FileStore) else None
