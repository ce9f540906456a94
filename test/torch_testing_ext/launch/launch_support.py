"""Shared helpers for the tests of the launch layer: run one method on ranks, take its outcome, count leftovers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import torch_testing_ext
from torch_testing_ext._cases import ranked
from torch_testing_ext._process import system
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.launch import client
from torch_testing_ext.launch.protocol import Dump

PACKAGE_PARENT = str(Path(torch_testing_ext.__file__).parents[1])


class Ranks(MultiProcessTestCase):
    """Subclasses name their methods without `test`: no loader picks them up, `outcome_of` runs them."""

    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)


def local_class() -> type[Ranks]:
    """A class that only processes forked from this one can have."""

    class Local(Ranks):
        def passes(self):
            pass

    return Local


@dataclass(frozen=True)
class Seen:
    """The result of one test as unittest reported it."""

    outcome: str  # passed, skipped, failed, error, expected failure, unexpected success
    message: str
    seconds: float


def outcome_of(test: unittest.TestCase) -> Seen:
    """Run one test case. Returns the result that unittest reported."""
    result = unittest.TestResult()
    began = time.monotonic()
    test.run(result)
    seconds = time.monotonic() - began
    for outcome, entries in (
        ("error", result.errors),
        ("failed", result.failures),
        ("skipped", result.skipped),
        ("expected failure", result.expectedFailures),
    ):
        if entries:
            return Seen(outcome, entries[0][1], seconds)
    return Seen("unexpected success" if result.unexpectedSuccesses else "passed", "", seconds)


@contextlib.contextmanager
def nothing_left(case: unittest.TestCase) -> Iterator[None]:
    """Assert that there are no more processes, files and descriptors afterwards than before."""
    _settle()
    before = _count()
    yield
    _settle()
    case.assertEqual(_count(), before)


def _settle() -> None:
    """Wait until the server has nothing to do: it answers in order, so its answer to a new request comes last."""
    server = client.launcher().server
    if server is not None and server.unusable is None:
        asked: Any = types.SimpleNamespace(dumped=False, alive=[], lost=None)
        server.runs[-1] = asked
        server.send(Dump(-1, (), 0.0))
        while not asked.dumped and server.step(time.monotonic() + 5):
            pass
        del server.runs[-1]


def _count() -> dict[str, object]:
    server = client.launcher().server.pid if client.launcher().server else None
    return {
        "children of the server": system.children(server) if server else [],
        "children besides the server": [pid for pid in system.children(os.getpid()) if pid != server],
        "files": sorted(p.name for p in client.launcher().session_directory().iterdir()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descriptors of the server": len(os.listdir(f"/proc/{server}/fd")) if server else 0,
    }


def timeout(seconds: float):
    """Another default time-out for a test."""
    return mock.patch.object(ranked, "TIMEOUT_DEFAULT", seconds)


def environ(**values: str):
    return mock.patch.dict(os.environ, values)


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """A new interpreter that can import the package, with its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write(directory: Path, name: str, source: str) -> Path:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source))
    return file


def gone(pid: int) -> bool:
    """Has this process ended? A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Wait for the end of processes that are not our children. Returns those that are still running."""
    for pid in pids:
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            try:
                import select

                select.select([fd], [], [], seconds)
            finally:
                os.close(fd)
    return [pid for pid in pids if not gone(pid)]


def heed_ctrl_c() -> None:
    """In setUpModule of tests that send Ctrl-C to this process or to a child.

    nohup and the background of a shell start programs, and so their children, with SIGINT ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    unittest.addModuleCleanup(signal.signal, signal.SIGINT, before)
