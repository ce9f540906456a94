"""Stores that ranks of several nodes share."""

from __future__ import annotations

import datetime
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

_dist: Any = dist  # its type stubs lack what comes from C++

_TIMEOUT = datetime.timedelta(seconds=300)  # of a FileStore, too
_server: tuple[str, int] = ("", 0)
_folder = ""
_opened: Counter[str] = Counter()


def serve() -> Any:
    """A store that listens on all addresses of this machine."""
    return _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect() -> Any:
    """The store of all ranks of this test."""
    address, port = _server
    return _dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)


def is_shared() -> bool:
    """Whether this process is a rank that has others on other nodes."""
    return bool(_folder)


def share_files(address: str, port: int, folder: str) -> None:
    """In a rank: have its file stores be parts of the store at this address, since the nodes share no files.

    `folder`: that of the test's files, which has another name on each node.
    """
    global _server, _folder
    _server, _folder = (address, port), folder
    _opened.clear()
    original = _dist.FileStore
    if original is FileStoreOfNodes:
        return
    for module in list(sys.modules.values()):
        names = [name for name, thing in getattr(module, "__dict__", {}).items() if thing is original]
        for name in names:
            setattr(module, name, FileStoreOfNodes)


class FileStoreOfNodes(getattr(_dist, "PrefixStore", object)):  # type: ignore[misc]
    """A FileStore whose file is a part of a store of TCP.

    The last FileStore that is closed removes its file: so one that a rank opens again is a new one.
    """

    def __init__(self, file_name: str, world_size: int = -1):
        name = str(file_name)
        if Path(name).is_relative_to(_folder):
            name = os.path.relpath(name, _folder)
        _opened[name] += 1
        self._path = file_name
        super().__init__(f"{name}#{_opened[name]}", connect())

    @property
    def path(self) -> str:
        return str(self._path)
