"""The facts for the header of the reports: command, commit, host, versions and devices."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch_testing_ext.runner.scheduling.inventory import Inventory

from .model import (
    RunHeader,
)

# A repository on a slow file system does not delay the run for longer.
COMMIT_TIMEOUT = 5.0


class CommitQuery:
    """Asks git for the commit of a folder, while the run prepares: `with CommitQuery(root) as query: ...`."""

    def __init__(self, root: Path, environ: Mapping[str, str] = os.environ, timeout: float = COMMIT_TIMEOUT):
        self._root = root
        self._timeout = timeout
        # A git command that the user runs meanwhile has priority.
        self._environ = {**environ, "GIT_OPTIONAL_LOCKS": "0"}
        self._git: subprocess.Popen[str] | None = None

    def __enter__(self) -> CommitQuery:
        command = ["git", "-C", str(self._root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        # git is not installed.
        with suppress(OSError):
            self._git = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
                env=self._environ,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._git is not None:
            self._git.kill()
            self._git.communicate()

    def answer(self) -> tuple[str, bool]:
        """The commit, and whether the folder has uncommitted changes; an empty commit if git does not say."""
        if self._git is None:
            return "", False
        try:
            output, _ = self._git.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            return "", False
        if self._git.returncode != 0:
            return "", False
        commit, dirty, _ = output.strip().partition("-dirty")
        return commit, bool(dirty)


def make_header(
    commit: CommitQuery, inventory: Inventory, torch_version: str, facts: Mapping[str, str] | None = None
) -> RunHeader:
    """The header of a run that this process has been started for."""
    name, dirty = commit.answer()
    return RunHeader(
        command=shlex.join(sys.orig_argv),
        commit=name,
        uncommitted_changes=dirty,
        host=platform.node(),
        torch=torch_version,
        python=platform.python_version(),
        devices=describe_devices(inventory),
        facts=facts or {},
    )


def describe_devices(inventory: Inventory) -> str:
    """The devices of the run, in words."""
    number = len(inventory.names)
    if not number:
        return "none (CPU only)"
    words = [str(number)]
    if inventory.fake:
        words.append("fake")
    elif inventory.kind:
        words.append(inventory.kind)
    words.append("device" if number == 1 else "devices")
    named = f"{' '.join(words)}: {', '.join(inventory.names)}"
    models = Counter(facts.name for facts in inventory.facts if facts.name)
    if inventory.fake or not models:
        return named
    if len(models) == 1:
        return f"{named} ({next(iter(models))})"
    counts = ", ".join(f"{count} x {model}" for model, count in models.items())
    return f"{named} (of {counts})"
