"""Source files, and whose they are."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import os
import tokenize
from pathlib import Path
from typing import Any

from torch_testing_ext._process.logs import content_of

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# The folders that run tests.
_RUN_TESTS = ("_hypothesis", "_pytest_ranks", "_testing/bases", "launch", "runner")
_HARNESS = tuple(f"{_PACKAGE}{folder}{os.sep}" for folder in _RUN_TESTS)


def source_file(of: Any) -> str:
    """The file with the source of a class or function; "" if it was typed in, or given to `python -c`."""
    try:
        return inspect.getsourcefile(of) or ""
    except (OSError, TypeError):
        return ""


def is_harness(file: str) -> bool:
    """Whether this source file runs tests. Those that tests use, as for models and assertions, do not count."""
    return file.startswith(_HARNESS)


def is_library(file: str) -> bool:
    """Whether this source file is neither a test's nor its project's."""
    return file.startswith((_PACKAGE, "<frozen ")) or "/torch/" in file or "/lib/python3" in file


def source_text(file: str) -> str:
    """The text of a source file, in the encoding that its first lines name; "" if it cannot be read."""
    content = content_of(Path(file))
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError:
        encoding = "utf-8"
    return content.decode(encoding, errors="replace")


@functools.cache
def is_head_of_function(file: str, line: int) -> bool:
    """Whether a line only begins a function: code that was compiled for all of it is said to run there."""
    lines = source_text(file).splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return text.startswith("@") or (text.startswith(("def ", "async def ")) and text.endswith((":", "(")))


def source_tree(file: str) -> ast.Module | None:
    """The syntax tree of a source file; None if it cannot be read or parsed."""
    return _parsed(content_of(Path(file)))


@functools.lru_cache(maxsize=8)
def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source) if source else None
    except (SyntaxError, ValueError):
        return None
