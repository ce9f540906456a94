"""Starts interpreters that import this tree, and watches processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch_testing_ext
from torch_testing_ext._process import system

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]


# A run of our own tests may have set these.
_NOT_INHERITED = (
    *("TORCH_TESTING_EXT_", "_TORCH_TESTING_EXT_", "PYTEST_", "COV_"),
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_"),
)


def clean_environ(**more: str) -> dict[str, str]:
    """The environment for another interpreter, which imports this tree and has no settings of this run."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return {**clean, "PYTHONPATH": str(ROOT), **more}


@contextlib.contextmanager
def files_not_kept() -> Iterator[None]:
    """Where a runner has started the test, it keeps the files of ranks for its report."""
    with mock.patch.dict(os.environ):
        os.environ.pop("TORCH_TESTING_EXT_LOGS", None)
        yield


def run_python(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter to its end."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = clean_environ(**{"PYTHONPATH": path, **environ})
    return subprocess.run([sys.executable, *map(str, words)], env=environ, capture_output=True, text=True, check=False)


def output_of_python(*words: object, **environ: str) -> str:
    """The stdout of a new interpreter, which has to exit with code 0."""
    done = run_python(*words, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_python(*arguments: str, cwd: Path, **environ: str) -> subprocess.Popen[str]:
    """Start a new interpreter, with its output in one pipe."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[Any]) -> None:
    """End a process, which may have ended, and close its output."""
    process.kill()
    process.wait()
    for pipe in process.stdout, process.stderr:
        if pipe is not None:
            pipe.close()


def descendants(pid: int) -> set[int]:
    return set(system.descendants(pid))


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Wait for the end of processes that are not our children. Returns those that are still running."""
    for pid in pids:
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            try:
                select.select([fd], [], [], seconds)
            finally:
                os.close(fd)
    return [pid for pid in pids if is_alive(pid)]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def heed_ctrl_c() -> None:
    """In setUpModule of tests that send Ctrl-C to this process or to a child.

    nohup and the background of a shell start programs, and so their children, with SIGINT ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    unittest.addModuleCleanup(signal.signal, signal.SIGINT, before)
