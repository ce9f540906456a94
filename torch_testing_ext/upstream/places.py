"""Where a test file belongs: PyTorch's tests and ours have the same paths below `test/`."""

from __future__ import annotations

from pathlib import Path

from .mapping import Mistake

TESTS = "test"


def below_tests(file: Path) -> Path:
    """A file's path below the directory of tests that it is in: of its checkout, else the last one so named."""
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
    if not file.is_file():
        raise Mistake(f"{file} is not there")
    return file.read_bytes()
