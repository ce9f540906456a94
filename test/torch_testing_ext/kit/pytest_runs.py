"""Runs pytest with our plugin on files that a test gives, and reads what its JUnit file says of each test."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kit.processes import ROOT, clean_environ
from kit.warm import run_cold, run_warm
from torch_testing_ext._machine.ports import leased_port

PACKAGE = ROOT / "torch_testing_ext"
PLUGIN = ("-p", "torch_testing_ext.pytest_plugin")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RUN_TIMEOUT = 300


@dataclass(frozen=True)
class PytestRun:
    """A run of pytest that is over."""

    code: int
    text: str  # stdout
    errors: str  # stderr
    outcomes: dict[str, str] = field(default_factory=dict)  # passed, failed, error, skipped or xfail; by test
    messages: dict[str, str] = field(default_factory=dict)  # by test
    outputs: dict[str, str] = field(default_factory=dict)  # system-out and system-err; by test


def run_pytest(
    files: Mapping[str, str],
    *options: str,
    plugin: tuple[str, ...] = PLUGIN,
    folder: str | None = None,
    cold: bool = False,
    **more: str,
) -> PytestRun:
    """Run pytest on these files, by name, in a folder of their own. `more`: environment variables.

    `cold`: in a new interpreter, which has not imported torch.
    """
    with tempfile.TemporaryDirectory() as temporary:
        # With a fixed name: pytest's -k matches that of the folder too, and a random one has any two letters some day.
        where = Path(folder) if folder else Path(temporary, "files")
        where.mkdir(exist_ok=True)
        for name, source in files.items():
            Path(where, name).write_text(source)
        report = Path(temporary, "junit", "report.xml")
        words = ["-p", "no:cacheprovider", "-q", f"--junitxml={report}", f"--rootdir={where}", "-c", os.devnull]
        words += ["-o", "junit_logging=all", "-o", "junit_family=xunit1"]
        command = ("-m", "pytest", *plugin, *words, *options)
        run = run_cold if cold else run_warm
        done = run(*command, cwd=where, env=clean_environ(**more), timeout=RUN_TIMEOUT)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    ended = PytestRun(done.returncode, done.stdout, done.stderr)
    for case in cases:
        name, outcome, message = _result_of(case)
        ended.outcomes[name], ended.messages[name] = outcome, message
        ended.outputs[name] = "".join(each.text or "" for each in case if each.tag.startswith("system-"))
    return ended


def run_under_torchrun(folder: Path, source: str, *options: str, **more: str) -> PytestRun:
    """Run pytest in two ranks of torchrun, on a file with this source. `more`: environment variables."""
    Path(folder, "test_x.py").write_text(source)
    report = Path(folder, "report.xml")
    words = [*PLUGIN, "-p", "no:cacheprovider", f"--rootdir={folder}", f"--junitxml={report}"]
    command = (*TORCHRUN, "-m", "pytest", *words, "-o", "junit_family=xunit1", *options, "test_x.py")
    environ = clean_environ(**more, **_own_temporary_folder(folder))
    done = run_warm(*command, cwd=folder, env=environ, timeout=RUN_TIMEOUT)
    run = PytestRun(done.returncode, done.stdout, done.stderr)
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        name, outcome, message = _result_of(case)
        run.outcomes[name], run.messages[name] = outcome, message
    return run


def run_under_two_agents(folder: Path, source: str, *options: str) -> PytestRun:
    """Run pytest in two ranks, each of an agent of torchrun of its own, as on two machines."""
    Path(folder, "test_x.py").write_text(source)
    report = Path(folder, "report.xml")
    words = [*PLUGIN, "-p", "no:cacheprovider", f"--rootdir={folder}", f"--junitxml={report}"]
    with leased_port() as port:
        agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
        agent += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=two_agents"]
        processes = [
            subprocess.Popen(
                [sys.executable, *agent, "-m", "pytest", *words, "-o", "junit_family=xunit1", *options, "test_x.py"],
                cwd=folder,
                env=clean_environ(**_own_temporary_folder(folder)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:  # a full pipe of one would block both
            texts = list(pool.map(lambda process: process.communicate(timeout=RUN_TIMEOUT), processes))
    text, errors = ("\n".join(parts) for parts in zip(*texts, strict=True))
    run = PytestRun(max(abs(process.returncode) for process in processes), text, errors)
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        name, outcome, message = _result_of(case)
        run.outcomes[name], run.messages[name] = outcome, message
    return run


def _own_temporary_folder(folder: Path) -> dict[str, str]:
    """A variable: torchrun leaves its logs in the temporary folder, and so does a rank that is killed."""
    temporary = Path(folder, "temporary")
    temporary.mkdir(exist_ok=True)
    return {"TMPDIR": str(temporary)}


def _result_of(case: ElementTree.Element) -> tuple[str, str, str]:
    """The name of a test in a JUnit file, its outcome, and its message."""
    cls = str(case.get("classname")).partition(".")[2]
    return (f"{cls}.{case.get('name')}" if cls else str(case.get("name")), *_outcome(case))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind, outcome in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            expected = found.get("type") == "pytest.xfail"
            return "xfail" if expected else outcome, f"{found.get('message')}\n{found.text or ''}"
    return "passed", ""


class PytestCase(unittest.TestCase):
    """A test case that runs pytest."""

    maxDiff = None

    def assertOutcomes(self, run: PytestRun, expected: Mapping[str, str]) -> None:
        """Assert the outcome of every test of a run."""
        self.assertEqual(run.outcomes, dict(expected), f"{run.text}\n{run.errors}")
