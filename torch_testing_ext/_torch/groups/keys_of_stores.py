"""Keys that a store lacks, while another thread of this process waits for them."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# The seconds for an answer. Only a server that has ended, or is stopped, takes longer.
_PATIENCE = 0.2
# Each is a question of its own.
_MOST_KEYS = 64


def missing_keys(store: Any, keys: Sequence[str]) -> list[str]:
    """The keys of these that a store lacks: all if it is not known, or cannot be asked now.

    A thread that waits keeps the connection to a server for itself. `Store.clone`, `PrefixStore.underlying_store`,
    `TCPStore.host`: 2.11 to 2.15.
    """
    from torch._C import _distributed_c10d as stores

    if not (isinstance(store, stores.Store) and 1 < len(keys) <= _MOST_KEYS):
        return list(keys)
    owner: Any = store
    while isinstance(owner, stores.PrefixStore):
        owner = owner.underlying_store
    with suppress(OSError, RuntimeError):
        if isinstance(owner, stores.TCPStore):
            socket.create_connection((owner.host, owner.port), _PATIENCE).close()
            store = store.clone()  # type: ignore[attr-defined]
        missing = [key for key in keys if not store.check([key])]
        return missing or list(keys)
    return list(keys)
