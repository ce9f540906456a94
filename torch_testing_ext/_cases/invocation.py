"""The command that runs a test again, as the tests of this process were invoked.

A module that runs tests in another way (upstream's drop-in) sets the variables before it imports the tests.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._process import shell
from torch_testing_ext._process.whole_files import source_file

python_arguments: list[str] = []  # between `python` and the file
pytest_arguments: list[str] = []  # between `pytest` and the test


def _no_note(reports: Sequence[launch.RankReport], expected: launch.Expected, verdict: launch.Verdict) -> str:
    return ""


# Returns a text to add to the message of a verdict.
verdict_note: Callable[[Sequence[launch.RankReport], launch.Expected, launch.Verdict], str] = _no_note


def command_of(test: unittest.TestCase, result: Any) -> str:
    """Return the command that runs just this test again. The `result` object of another runner knows its own."""
    if (known := getattr(result, "command_of", None)) is not None:
        return str(known(test))
    cls = type(test)
    file = source_file(cls) or "?"
    with suppress(ValueError):
        file = os.path.relpath(file)
    name = f"{cls.__qualname__}.{test._testMethodName}"
    if not isinstance(result, unittest.TestResult):  # that of pytest
        node = f"{file}::{cls.__qualname__}::{test._testMethodName}"
        return shell.join(["python", "-m", "pytest", *pytest_arguments, node])
    if cls.__module__ == "__main__":
        module = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None)  # of `python -m`
        main = ["-m", module] if module else [file]
        return shell.join(["python", *python_arguments, *main, name])
    return shell.join(["python", "-m", "unittest", f"{cls.__module__}.{name}"])
