"""Checkouts: the paths of test files in them, which are the same below `test/` in PyTorch's and ours, and git."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .mapping import UserError

TESTS = "test"


def below_tests(file: Path) -> Path:
    """A file's path below its checkout's `test/`; outside a checkout, below the innermost directory named `test`."""
    path = file.resolve()
    for root in path.parents:
        if (root / ".git").exists() and path.is_relative_to(root / TESTS):
            return path.relative_to(root / TESTS)
    parts = path.parts[:-1]
    if TESTS in parts:
        last = len(parts) - 1 - parts[::-1].index(TESTS)
        return Path(*path.parts[last + 1 :])
    return Path(path.name)


def read(file: Path) -> bytes:
    """The content of a file that the user named."""
    if not file.is_file():
        raise UserError(f"{file} does not exist")
    return file.read_bytes()


def run_git(words: Sequence[str], directory: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git in a directory, which does not count as part of a repository above it."""
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.resolve().parent)}
    # The user's git configuration must not affect what it does.
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.attributesFile=", *words]
    try:
        return subprocess.run(command, cwd=directory, input=stdin, capture_output=True, env=alone, check=False)
    except FileNotFoundError:
        raise UserError("this command needs git, which is not on PATH") from None
