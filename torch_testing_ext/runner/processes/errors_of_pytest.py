"""Errors of pytest and of plugins, as a user is told them."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path

import pytest

from torch_testing_ext._pytest_ranks.pytest_internals import configuration

_OUR_FOLDER = str(Path(__file__).parents[2]) + os.sep
_IMPORTLIB = str(Path(importlib.__file__ or "").parent) + os.sep


def explain_error(error: BaseException) -> str:
    """An error of pytest or of a plugin, for the user: the title, and the traceback outside of pytest."""
    if isinstance(error, pytest.UsageError):
        return _explain_usage_error(str(error))
    if isinstance(error, pytest.exit.Exception):
        return f"pytest.exit was called: {error}"
    if isinstance(error, pytest.Session.Interrupted):
        return f"pytest was interrupted: {error}"
    failed = configuration.failed_conftest(error)
    if failed is not None:
        path, cause = failed
        title = f"{path} cannot be imported"
        return title if cause is None else f"{title}: {explain_error(cause)}"
    tb = error.__traceback__
    while tb is not None and _is_internal(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    shown = traceback.TracebackException(type(error), error, tb)
    frames = [frame for frame in shown.stack if not _is_internal(frame.filename)]
    shown.stack = traceback.StackSummary.from_list(frames)
    text = "".join(shown.format())
    title = text.strip().splitlines()[-1] if text.strip() else type(error).__name__
    return f"{title}\n\n{text.rstrip()}"


def _explain_usage_error(text: str) -> str:
    for line in text.splitlines():
        _, is_error, message = line.partition(": error: ")
        if is_error and message:
            return f"pytest refuses its options: {message}\n\n{text}"
        _, is_unknown, place = line.partition("not found: ")
        if is_unknown and Path(place).is_file():
            return f"pytest has no tests in {place}. The names of test files are its setting python_files: test_*.py"
    return f"pytest: {text}"


def _is_internal(file: str) -> bool:
    """Whether a file is part of pytest, of its plugin system, of the import system or of this package."""
    if file.startswith(("<frozen ", _OUR_FOLDER, _IMPORTLIB)):
        return True
    parts = Path(file).parts
    return "_pytest" in parts or "pluggy" in parts
