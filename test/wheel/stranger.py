"""A stranger's machine: an environment with the wheel beside the default torch of the index, and projects in it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kit.processes import clean_environ
from kit.source_copy import copy_source

ROOT = Path(__file__).resolve().parents[2]
NAME = "torch-testing-ext"
# All that users have. `test` and `docs` are for work on the package.
EXTRAS = "gpu,moving,pytest,ray,ui,upstream"
BESIDE = ("pytest-xdist", "pytest-cov", "uv", "mypy")
# The CUDA build of torch has 5.3 GB, unpacked.
GIGABYTES = 8
# Not a pin: the newest torch, and not an older one that fits.
NEWEST = ROOT / ".ci" / "newest.txt"


class CannotInstall(Exception):
    """No environment can be made; the message says why."""


def make_environment(folder: Path) -> None:
    """Install the wheel of this checkout, in a new environment unless the folder has one. Raises CannotInstall."""
    python = folder / "bin" / "python"
    is_new = not python.exists()
    if is_new:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free / 1e9
        if free < GIGABYTES:
            raise CannotInstall(
                f"{folder}: the default torch needs {GIGABYTES} GB of free disk, and {free:.1f} GB are free"
            )
        _install(sys.executable, "-m", "venv", folder)
    wheels = _build(folder)
    # By its name, as from an index, which serves the same file.
    pip = (python, "-m", "pip", "install", "--quiet", "--find-links", wheels)
    if is_new:
        _install(*pip, f"{NAME}[{EXTRAS}]", *BESIDE)
    else:
        _install(*pip, "--force-reinstall", "--no-deps", NAME)


def _build(folder: Path) -> Path:
    """Build the wheel from a copy: setuptools leaves folders where it builds, and takes what it finds there.

    Returns its folder.
    """
    copy, wheels = folder / "checkout", wheels_of(folder)
    for made in (copy, wheels):
        shutil.rmtree(made, ignore_errors=True)
    copy_source(ROOT, copy)
    _install(folder / "bin" / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", wheels, copy)
    shutil.rmtree(copy)
    return wheels


def wheels_of(environment: Path) -> Path:
    """The folder with the wheel that an environment has."""
    return environment / "wheels"


def _install(*command: object) -> None:
    environ = clean_environ(PIP_CONSTRAINT=str(NEWEST))
    del environ["PYTHONPATH"]
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise CannotInstall(f"{shlex.join(words)}\n{done.stdout}")


class Stranger:
    """Someone with an environment and a project, who knows nothing of the checkout."""

    def __init__(self, environment: Path, folder: Path):
        self.environment = environment
        self.project = folder / "project"
        self.project.mkdir()
        self._runtime = folder / "runtime"
        self._runtime.mkdir(0o700)
        path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
        # Servers that stay warm are those of this folder.
        self.environ = clean_environ(PATH=path, XDG_RUNTIME_DIR=str(self._runtime))
        # A runner in CI uses no warm server of an earlier run.
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "CI", "GITHUB_ACTIONS"):
            self.environ.pop(name, None)

    def write(self, files: Mapping[str, str]) -> None:
        """Write files of the project, each with its text."""
        for name, text in files.items():
            file = self.project / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def commit(self) -> None:
        """Commit all of the project to git."""
        who = "-c user.name=stranger -c user.email=stranger@example.org"
        self.types(f"git init --quiet . && git add --all && git {who} commit --quiet -m all")

    def types(self, command: str, code: int = 0) -> str:
        """Run a command in the project. Return what it prints; fail if it exits with another code."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.project,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"$ {command}\n{done.stdout}")
        assert done.returncode == code, f"$ {command}\nexit code {done.returncode}, not {code}:\n{done.stdout}"
        return done.stdout

    def servers(self) -> list[str]:
        """The sockets of the servers of this project that run."""
        return [path.name for path in self._runtime.rglob("*.socket")]

    def leave(self) -> None:
        """End the servers of this project."""
        if self.servers():
            self.types("torchtest --warm=off --list")
