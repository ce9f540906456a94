"""The temporary folder of a run with several workers: nothing of ours may be left in it.

The run has one of its own, and each of its workers a folder in that, so that other runs on the machine do not count.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PREFIX = "tte_"
# Seconds. What outlives a test ends when its worker has ended, soon: a server of the tests.
PATIENCE = 15.0
# In the folder of a worker: for each file, the test after which it was there first.
_FIRST_SEEN = ".first-seen"
# Names of what we make, or have made. All else is listed, but is no failure: PyTorch's own test classes leave files.
OURS = ("torch_testing_ext", "torchelastic_", "fixture_project_", "gpu_check_", PREFIX)
# pytest keeps the folders of its last three runs, and torch what it has compiled. Both on purpose.
_KEPT = ("pytest-of-", "torchinductor_")


class RunFolder:
    """The folder of a run: made before the workers start, looked through after they have ended."""

    def __init__(self) -> None:
        usual = tempfile.gettempdir()
        # Not left behind, but kept: the folders of the fixture `tmp_path`, and what torch has compiled.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(usual, f"torchinductor_{getpass.getuser()}"))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        _use(self.folder)
        self.left: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.left = self._wait_until_empty()
        shutil.rmtree(self.folder, ignore_errors=True)
        ours = [line for line in self.left if line.startswith(OURS)]
        if ours and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _wait_until_empty(self) -> list[str]:
        """What is left when the time is over."""
        deadline = time.monotonic() + PATIENCE
        while (left := describe_left(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        # Last, because .ci/run shows the end of the output where no test has failed.
        yield
        if self.left:
            terminalreporter.section("left in the temporary folder", red=True)
            for line in self.left:
                terminalreporter.write_line(line)


class WorkerFolder:
    """The folder of a worker. Notes after which test a file was there first."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.gettempdir(), name.removeprefix("gw"))
        self.folder.mkdir(exist_ok=True)
        _use(self.folder)
        self._share_compiled()
        self._pid = os.getpid()
        self._seen: set[str] = set()

    def _share_compiled(self) -> None:
        """Let torch find the headers of C++ that it has compiled, in 15 s of CPU, for another worker or run.

        It looks for them in the temporary folder, whatever TORCHINDUCTOR_CACHE_DIR says.
        """
        kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "precompiled_headers")
        kept.mkdir(parents=True, exist_ok=True)
        folder = self.folder / f"torchinductor_{getpass.getuser()}"
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # this is a worker's successor
            (folder / kept.name).symlink_to(kept)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        yield
        # A rank that was forked from this process runs the test's item, too.
        if os.getpid() != self._pid:
            return
        names = set(os.listdir(self.folder)) - {_FIRST_SEEN}
        new = names - self._seen
        self._seen = names
        if new:
            with open(self.folder / _FIRST_SEEN, "a") as file:
                file.writelines(f"{name}\t{item.nodeid}\n" for name in sorted(new))


def _use(folder: Path) -> None:
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)


def describe_left(folder: Path) -> list[str]:
    """A line for each thing that is left in the folder of a run or of one of its workers."""
    lines = []
    for child in sorted(folder.iterdir()):
        if not child.name.isdigit():
            lines.append(child.name)
            continue
        seen = child / _FIRST_SEEN
        tests = dict(line.split("\t", 1) for line in seen.read_text().splitlines()) if seen.exists() else {}
        for name in sorted(os.listdir(child)):
            if name != _FIRST_SEEN and not name.startswith(_KEPT):
                lines.append(f"{name}: first seen after {tests.get(name, 'the last test')}{_contents(child / name)}")
    return lines


def _contents(folder: Path) -> str:
    try:
        names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
    except OSError:  # it is being removed
        names = []
    return f", with {', '.join(names[:5])}" if names else ""


def use_own_folder(config: pytest.Config) -> None:
    """Give the run a temporary folder, if it has workers, or the worker its own."""
    if hasattr(config, "workerinput"):
        if Path(tempfile.gettempdir()).name.startswith(PREFIX):
            config.pluginmanager.register(WorkerFolder(config.workerinput["workerid"]), "worker-folder")
    elif config.getoption("dist", "no") != "no" and not config.option.collectonly:
        config.pluginmanager.register(RunFolder(), "run-folder")
