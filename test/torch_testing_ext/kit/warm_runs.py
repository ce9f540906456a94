"""A project with warm servers of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.processes import clean_environ

TIMEOUT = 120


class WarmProject:
    """A folder with tests, and with another one for the sockets of servers."""

    def __init__(self, folder: Path):
        self.root = folder / "project"
        self.runtime = folder / "runtime"
        # For programs that are started here: a killed run leaves its folder for the next run to remove.
        temporary = folder / "tmp"
        for made in (self.root, self.runtime, temporary):
            made.mkdir()
        self.environ = {**clean_environ(), "XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(temporary)}
        # A run in CI uses no server that it is not told to use.
        self.environ.pop("CI", None)
        # A compiled file does not tell sources of one size and second apart, and these runs take less than a second.
        self.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run `torchtest`."""
        given = {**self._given(words), "capture_output": True, "timeout": TIMEOUT, **more}
        return subprocess.run(**given, check=False)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(**self._given(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _given(self, words: tuple[str, ...]) -> dict[str, Any]:
        command = [sys.executable, "-m", "torch_testing_ext", *words]
        return {"args": command, "cwd": self.root, "env": self.environ, "text": True, "stdin": subprocess.DEVNULL}

    def servers(self) -> list[int]:
        """The processes of the servers, without those that they have forked."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        return [pid for pid in pids if self._is_of_server(pid) and not self._is_of_server(parent_of(pid))]

    def _is_of_server(self, pid: int) -> bool:
        with suppress(OSError):
            return os.fsencode(self.runtime) in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def close(self) -> None:
        """End the servers, and what they have forked, however a test has left them."""
        for pid in self.servers():
            gone = when_ended(pid)
            os.kill(pid, signal.SIGTERM)
            gone()


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def when_ended(pid: int) -> Callable[[], None]:
    """A function that waits for the end of a process that runs now."""
    gone = os.pidfd_open(pid)

    def wait() -> None:
        ended = select.select([gone], [], [], TIMEOUT)[0]
        os.close(gone)
        assert ended, f"process {pid} goes on"

    return wait
