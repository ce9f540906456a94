"""Runs of programs by a warm server of the test's own, and the same runs without it."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM = ("-m", "torch_testing_ext.warm")
TIMEOUT = 120


class WarmBench:
    """A project in a folder of its own, with a server of its own."""

    def __init__(self, folder: Path, torch: bool = True):
        """`torch`: whether there is a real one, which takes seconds to import for each server."""
        self.project, self.packages = folder / "project", folder / "packages"
        # Of the programs that are started here: a killed run leaves its folder for the next run to remove.
        temporary = folder / "tmp"
        for made in (self.project, self.packages, temporary, folder / "runtime"):
            made.mkdir()
        if not torch:
            (self.packages / "torch").mkdir()
            (self.packages / "torch" / "__init__.py").write_text("def initial_seed():\n    return 67280421310721\n")
        path = os.pathsep.join(filter(None, (str(self.packages), os.environ.get("PYTHONPATH"))))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_TESTING_EXT_", "PYTEST_", "COV"))}
        self.environ = {**kept, "XDG_RUNTIME_DIR": str(folder / "runtime"), "PYTHONPATH": path}
        self.environ["TMPDIR"] = str(temporary)
        self.environ["TORCH_TESTING_EXT_WARM_IDLE"] = "120"  # nobody may be left to stop the server
        self.servers = folder / "runtime" / f"torch_testing_ext_warm_{os.getuid()}"

    def write(self, name: str, text: str) -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def install_plugin(self, name: str, text: str) -> None:
        """Install a module as a plugin of pytest, or change it."""
        (self.packages / f"{name}.py").write_text(text)
        facts = self.packages / f"{name}-1.0.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[pytest11]\n{name} = {name}\n")
        (facts / "RECORD").write_text(f"{name}.py,,\n")

    def command(self, *words: str, warm: bool = True) -> dict[str, Any]:
        """Arguments for `subprocess`."""
        return {"args": [sys.executable, *(WARM if warm else ()), *words], "cwd": self.project, "env": self.environ}

    def run(self, *words: str, warm: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        pipes = {"stdin": subprocess.DEVNULL} if "input" not in options else {}
        given = {**self.command(*words, warm=warm), "text": True, "capture_output": True, "timeout": TIMEOUT}
        return subprocess.run(**{**given, **pipes, **options}, check=False)

    def start(self, *words: str, warm: bool = True, **options: Any) -> subprocess.Popen[str]:
        given = {**self.command(*words, warm=warm), "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(**{"stdin": subprocess.DEVNULL, **given, **options})

    def status(self) -> str:
        return self.run("status").stdout

    def server(self) -> int:
        """The pid of the only server."""
        found = re.findall(r"server (\d+):", self.status())
        assert len(found) == 1, found
        return int(found[0])

    @staticmethod
    def when_ended(pid: int) -> Callable[[], None]:
        """A function that waits for the end of a process that runs now."""
        gone = os.pidfd_open(pid)

        def wait() -> None:
            ended = select.select([gone], [], [], TIMEOUT)[0]
            os.close(gone)
            assert ended, f"process {pid} goes on"

        return wait

    def close(self) -> None:
        self.run("stop")


def settle(text: str) -> str:
    """An output without what differs between any two runs: times, addresses, pids."""
    text = re.sub(r"\d+\.\d+ ?s\b", "T", text)
    return re.sub(r"0x[0-9a-f]+|\[W?\d+[ :.\d]*\]", "ADDRESS", text)
