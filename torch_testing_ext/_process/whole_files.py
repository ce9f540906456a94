"""Files: written completely or not at all, behind a descriptor that a test may close, or of source code."""

import ast
import functools
import inspect
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from .logs import content_of

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# The folders that run tests.
_RUN_TESTS = ("_cases", "_hypothesis", "_pytest_ranks", "_threads", "launch", "runner")
_HARNESS = tuple(f"{_PACKAGE}{folder}{os.sep}" for folder in _RUN_TESTS)
DESCRIPTORS_CLOSED = "the test closed file descriptors of its process that were not its own (os.close, os.closerange)"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by one with this text: a reader sees the old text or the new text, never a part.

    A path that is not a regular file (a pipe, a device) cannot be replaced; it is written directly.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def source_file(of: Any) -> str:
    """The file with the source of a class or function; "" if it was typed in, or given to `python -c`."""
    try:
        return inspect.getsourcefile(of) or ""
    except (OSError, TypeError):
        return ""


def is_harness(file: str) -> bool:
    """Does this source file run tests? Those that tests use, as for models and assertions, do not count."""
    return file.startswith(_HARNESS)


def is_library(file: str) -> bool:
    """Is this source file neither a test's nor its project's?"""
    return file.startswith((_PACKAGE, "<frozen ")) or "/torch/" in file or "/lib/python3" in file


def source_tree(file: str) -> ast.Module | None:
    """The syntax tree of a source file; None if it cannot be read or parsed."""
    return _parsed(content_of(Path(file)))


@functools.lru_cache(maxsize=8)
def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source) if source else None
    except (SyntaxError, ValueError):
        return None


def file_behind(fd: int) -> tuple[int, int] | None:
    """Identify the file of a descriptor; None if it is closed. Another file may have got its number since."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino
