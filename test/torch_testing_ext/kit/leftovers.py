"""Asserts that a test leaves no processes, files and descriptors."""

from __future__ import annotations

import collections
import contextlib
import os
import time
import types
import unittest
from collections.abc import Iterator, Mapping
from typing import Any

from torch_testing_ext._process import system
from torch_testing_ext.launch import start
from torch_testing_ext.launch.fork_server_messages import Dump


@contextlib.contextmanager
def nothing_left(case: unittest.TestCase) -> Iterator[None]:
    """Assert that there are no more processes, files and descriptors afterwards than before."""
    _settle()
    before = _count()
    yield
    _settle()
    after = _count()
    case.assertEqual({what: after[what] for what in after if after[what] != before[what]}, {}, before)


def _settle() -> None:
    """Wait until the server has nothing to do: it answers in order, so its answer to a new request comes last."""
    server = start.launcher().server
    if server is not None and server.unusable is None:
        asked: Any = types.SimpleNamespace(dumped=False, alive=[], lost=None)
        server.runs[-1] = asked
        server.send(Dump(-1, (), 0.0))
        while not asked.dumped and server.loop.step(time.monotonic() + 5):
            pass
        del server.runs[-1]


def _count() -> dict[str, object]:
    server = start.launcher().server.pid if start.launcher().server else None
    return {
        "children of the server": system.children(server) if server else [],
        "children besides the server": [pid for pid in system.children(os.getpid()) if pid != server],
        "files": _files(),
        "descriptors": _descriptors(os.getpid()),
        "descriptors of the server": _descriptors(server) if server else {},
    }


def _files() -> list[str]:
    """The files of runs in the folder of this process, which may have none."""
    folder = start.launcher()._directory
    return sorted(os.listdir(folder)) if folder is not None else []


def _descriptors(pid: int) -> Mapping[str, int]:
    """How many descriptors of each kind a process has: pipes, sockets, and files by their path."""
    return collections.Counter(target.partition(":[")[0] for target in system.opened(pid))
