"""The paths of test files: PyTorch's tests and ours have the same ones below `test/`."""

from __future__ import annotations

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
