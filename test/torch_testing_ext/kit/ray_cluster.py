"""A Ray cluster on this machine with two pretended nodes, and runs on it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kit.processes import descendants, is_alive
from kit.runs import ROOT, RunsCase
from torch_testing_ext._process import system

from .files import subject

HAS_RAY = importlib.util.find_spec("ray") is not None
_CLUSTER = subject(__file__, "start_ray.py")


class RayCluster:
    """The cluster: its address, and the folder that its nodes take for TMPDIR."""

    def __init__(self, add_cleanup: Callable[..., object], **settings: str):
        """`settings`: variables for the processes of Ray."""
        self.folder = tempfile.mkdtemp(prefix="tte_ray_", dir="/tmp")  # short: Ray's sockets are below it
        add_cleanup(shutil.rmtree, self.folder, ignore_errors=True)
        Path(self.folder, "ray").mkdir()  # in TMPDIR, Ray expects it
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": self.folder, **settings}
        with open(Path(self.folder, "errors"), "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CLUSTER, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ,
                text=True,
                start_new_session=True,
            )
        add_cleanup(self._end)
        self.address = self._said()

    def _said(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline().strip()):
            raise RuntimeError(f"Ray failed: {Path(self.folder, 'errors').read_text()[-3000:]}")
        return line

    def change(self, *words: str) -> None:
        """Add, drain or remove the node of an address."""
        print(*words, file=self._process.stdin, flush=True)
        self._said()

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        below = descendants(self._process.pid)
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> set[int]:
        """All processes of the cluster."""
        return descendants(self._process.pid)

    def agents(self) -> set[int]:
        """The agents on all nodes, by pid."""
        return {pid for pid, line in self.of_runs().items() if "runner.cluster.agent" in line}

    def of_runs(self) -> dict[int, str]:
        """The processes on all nodes that belong to runs, with their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = command_line(int(folder.name))
                is_one = line.startswith("sleep 1000") or "torch_testing_ext.runner.cluster.agent" in line
                if is_one and f"TMPDIR={self.folder}\0".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = line
        return found

    def folders_of_runs(self) -> list[str]:
        of_runs = ("torch_testing_ext-nodes-*/run*", "torch_testing_ext_run_*")
        return [str(one) for pattern in of_runs for one in Path(self.folder).glob(pattern)]


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def ancestor(pid: int, word: str) -> int:
    """The nearest ancestor of a process whose command line has a word."""
    return next(one for one in ancestors(pid) if word in command_line(one))


class ClusterCase(RunsCase):
    """Runs of run_test.py on a cluster."""

    cluster: RayCluster

    def start_on(self, address: str, *argv: str, **more: str) -> Any:
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
        try:
            return self.start("--cluster", address, *argv, environ={"PYTHONPATH": path, **more})
        finally:
            signal.signal(signal.SIGINT, before)

    def refuse(self, address: str, *argv: str) -> str:
        """Expect a run to be refused. Returns why."""
        out = self.finish(self.start_on(address, *argv), 4)
        self.assertEqual(out, "")
        lines = self.stderr.splitlines(keepends=True)  # one in ten seconds says what the run waits for
        return "".join(line for line in lines if not line.startswith("run_test.py: waiting for "))

    def assert_nothing_is_left(self, below: Iterable[int], seconds: float = 10.0) -> None:
        """No process, and no folder but that of kept projects, after so many seconds at most: idle cores take one."""
        self.wait_until_gone(below, 3.0 + seconds)
        end = time.monotonic() + seconds
        while left := [*self.cluster.of_runs().values(), *self._folders()]:
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        self.assertEqual(left, [])

    def _folders(self) -> list[str]:
        return [*self.cluster.folders_of_runs(), *map(str, self.temporary.glob("torch_testing_ext_run_*"))]

    def wait_until_gone(self, pids: Iterable[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for pid in (pids := [*pids]):
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
                finally:
                    os.close(fd)
        self.assertEqual([system.describe(pid) for pid in pids if is_alive(pid)], [])
