"""Runs of run_test.py by a check, and what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path("benchmarks/gpu/project")


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    code: int
    text: str  # of the console
    document: dict[str, Any]  # of --results

    @property
    def tests(self) -> dict[str, dict[str, Any]]:
        """By the name of the method."""
        return {one["id"].rpartition("::")[2]: one for one in self.document.get("tests", [])}

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: one["outcome"] for name, one in self.tests.items()}

    def on_gpu(self) -> list[str]:
        """The tests that have had memory of a GPU: a lease alone does not show that a test was there."""
        tests = self.document.get("tests", [])
        return [one["id"] for one in tests if one["attempts"][-1].get("device_memory")]

    def idle_leases(self) -> list[str]:
        """The tests that have leased GPUs and passed without memory of any."""
        leased = [one for one in self.document.get("tests", []) if one["attempts"][-1]["devices"]]
        used = set(self.on_gpu())
        return [one["id"] for one in leased if one["counts_as"] == "passed" and one["id"] not in used]

    def count(self, verdict: str) -> int:
        return int(self.document.get("verdicts", {}).get(verdict, 0))

    def message(self, name: str) -> str:
        return str(self.tests.get(name, {"attempts": [{"message": "it has no result"}]})["attempts"][-1]["message"])

    def title(self, name: str) -> str:
        """The first line of a test's message."""
        return self.message(name).strip().partition("\n")[0]

    def backends(self) -> set[str]:
        """The backends of ranks that have shared GPUs."""
        shared = [one["attempts"][-1]["sharing"] for one in self.document.get("tests", [])]
        return {one["backend"] for one in shared if one}

    def began(self, name: str) -> float:
        """When a test has begun, by the clock."""
        return float(self.document["began"] + self.tests[name]["attempts"][-1]["began"])

    def ended(self, name: str) -> float:
        return self.began(name) + float(self.tests[name]["attempts"][-1]["seconds"])

    @property
    def failures(self) -> list[str]:
        return [
            f"{one['id']}: {one['outcome']}: {one['attempts'][-1]['message'].strip()[:300]}"
            for one in self.document.get("tests", [])
            if one["counts_as"] == "failed"
        ]


def start_run_test(
    check: Any, *argv: str, name: str = "run", environ: dict[str, str] | None = None
) -> subprocess.Popen:
    """Start run_test.py on files of the project, or of those of `-otests=`. `name`: for its files."""
    folder = check.folder / name
    folder.mkdir()
    words = [sys.executable, str(check.root / "run_test.py"), *argv, "--results", str(folder / "results.json")]
    words += ["--cache", str(check.folder / "cache")]
    if not any(word.startswith("-otests=") for word in argv):
        words += [f"-otests={check.root / PROJECT}"]
    print(f"$ {' '.join(words)}", flush=True)
    with (folder / "console").open("wb") as console:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            cwd=check.root,
            env={**os.environ, **(environ or {})},
        )


def finish(check: Any, process: subprocess.Popen, name: str = "run") -> Finished:
    """Wait for a run that was started under this name."""
    code = process.wait()
    folder = check.folder / name
    text = (folder / "console").read_text(errors="replace")
    print(text, flush=True)
    file = folder / "results.json"
    return Finished(code, text, json.loads(file.read_text()) if file.exists() else {})


def run_test(check: Any, *argv: str, name: str = "run", environ: dict[str, str] | None = None) -> Finished:
    return finish(check, start_run_test(check, *argv, name=name, environ=environ), name)


def run_with_memory(c: Any, *words: str, **more: Any) -> Finished:
    """Run tests, and expect that the GPUs have their memory back after the run. Skips the check without NVML."""
    from torch_testing_ext._machine.nvml import open_nvml
    from torch_testing_ext._process.questions import NoAnswer
    from torch_testing_ext.runner.engine.memory_return import MEMORY_MARGIN

    try:
        nvml = open_nvml()
    except NoAnswer as error:
        c.skip(f"memory cannot be checked: {error}")

    def used() -> int:
        return sum(usage.memory or 0 for usage in nvml.usage().values())

    with closing(nvml):
        before = used()
        finished = run_test(c, *words, **more)
        more = used() - before
    c.expect(more <= MEMORY_MARGIN, "the GPUs have their memory back after the run", more)
    return finished
