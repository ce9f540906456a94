"""Runs of the real run_test.py in a project of their own, as processes."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.files import FolderCase
from kit.processes import ROOT as ROOT, clean_environ, end
from kit.warm import run_cold, start_cold, start_run

RUN_TEST = """
import sys
from pathlib import Path
{before}
from torch_testing_ext.runner.cli import main
sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))
"""
REPORTS = ("--junitxml=x.xml", "--html=x.html", "--perfetto=trace.json", "--results=results.json")


@dataclass(frozen=True)
class FinishedRun:
    """A run of run_test.py that is over."""

    folder: Path
    code: int
    console: str
    complaints: str  # on stderr

    def report(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


def run_test(folder: Path, *arguments: str, cold: bool = False, **environ: str) -> FinishedRun:
    """`python run_test.py` in a project of its own. `cold`: its preloaded server is a new interpreter."""
    inherited = {name: value for name, value in os.environ.items() if "TORCH_TESTING_EXT_" not in name}
    environ = {**inherited, "PYTHONPATH": str(ROOT), "PROJECT_ATTEMPTS": str(folder / "attempts"), **environ}
    if cold:
        done = run_cold("run_test.py", *arguments, cwd=folder, env=environ)
        return FinishedRun(folder, done.returncode, done.stdout, done.stderr)
    with start_run("run_test.py", *arguments, cwd=folder, env=environ) as process:
        console, complaints = process.communicate(timeout=300)
    return FinishedRun(folder, process.returncode, console, complaints)


class RunsCase(FolderCase):
    """A project with a run_test.py, and a folder for temporary files."""

    def setUp(self) -> None:
        super().setUp()
        self.temporary = self.root / "tmp"
        self.temporary.mkdir()
        self.write("run_test.py", RUN_TEST.format(before=""))

    def break_by(self, code: str) -> None:
        """Have run_test.py execute this code before it starts."""
        self.write("run_test.py", RUN_TEST.format(before=code))

    def start(
        self,
        *argv: str,
        before: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        cold: bool = False,
        **streams: Any,
    ) -> Any:
        """Start run_test.py.

        `cold`: its preloaded server is its child, a new interpreter; also if other words come before it.
        """
        given = environ or {}
        env = clean_environ(**{"TMPDIR": str(self.temporary), **given})
        # A run in CI would use no server.
        if "CI" not in given:
            env.pop("CI", None)
        words = ("run_test.py", *argv)
        if cold or before:
            process = start_cold(*words, before=before, cwd=self.root, env=env, **streams)
        else:
            process = start_run(*words, cwd=self.root, env=env, **streams)
        self.addCleanup(end, process)
        return process

    def finish(self, process: Any, *codes: int) -> str:
        out, err = process.communicate()
        self.assertIn(process.returncode, codes, f"{out}\n{err}")
        self.stderr = err
        return out or ""

    def wait_for_writer(self, fifo: str, process: Any) -> str:
        """Wait until something has written into the FIFO, and closed it. Returns that; fails if the run ends before."""
        reading, ended = os.open(self.root / fifo, os.O_RDONLY | os.O_NONBLOCK), os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(reading, select.POLLIN | select.POLLHUP)
            poll.register(ended, select.POLLIN)
            happened = [fd for fd, _ in poll.poll()]
            if reading in happened:
                os.set_blocking(reading, True)
                return b"".join(iter(lambda: os.read(reading, 4096), b"")).decode()
        finally:
            os.close(reading)
            os.close(ended)
        self.fail(f"the run ended: {self.finish(process, 0, 1, 2, 3, 4)}{self.stderr}")

    def results(self, name: str = "results.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / name).read_text())
        return found

    def outcomes(self) -> dict[str, str]:
        return {test["id"].rpartition("::")[2]: test["outcome"] for test in self.results()["tests"]}

    def journals(self) -> list[Path]:
        return sorted((self.root / ".torch_testing_ext").glob("runs/*/journal.jsonl"))
