"""`SPMDError`, and the search for the line of user code that caused it."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_WRAPPERS = ("typing_extensions.py",)  # between the step and torch, where torch marks a function as deprecated


_recorders: list[list[Exception]] = []


@contextlib.contextmanager
def recording_errors() -> Iterator[list[Exception]]:
    """Record every `SPMDError` of this context, also those that a step catches."""
    raised: list[Exception] = []
    _recorders.append(raised)
    try:
        yield raised
    finally:
        _recorders.remove(raised)


class SPMDError(ValueError):
    """The step, model or optimizer cannot be made data parallel. Model and optimizer are unchanged.

    `what` is the problem, `where` the line of user code that caused it ("file:line, in function: code"), and `remedy`
    says how to fix it.
    """

    def __init__(self, what: str, *, remedy: str, where: str | None = None) -> None:
        self.what, self.remedy, self.where = what, remedy, where
        for raised in _recorders:
            raised.append(self)
        super().__init__("\n".join(filter(None, [what, where and f"  at {where}", f"  {remedy}"])))


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to torch nor to this package."""
    return not filename.startswith((_TORCH, _PACKAGE, "<")) and not filename.endswith(_WRAPPERS)


def is_own_file(filename: str) -> bool:
    """Whether a file belongs to this package."""
    return filename.startswith(_PACKAGE)


def describe_line(filename: str, lineno: int, function: str) -> str:
    """A line of code as "file:line, in function: code"."""
    code = linecache.getline(filename, lineno).strip()
    return f"{filename}:{lineno}, in {function}: {code}"


def user_line(frame: FrameType | None = None) -> str | None:
    """The innermost line on the stack that belongs neither to torch nor to this package."""
    caller: FrameType | None = frame or sys._getframe(1)
    while caller is not None:
        if is_user_file(caller.f_code.co_filename):
            return describe_line(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)
        caller = caller.f_back
    return None


def user_line_of(error: BaseException) -> str | None:
    """The innermost line of user code in the traceback of `error`."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(entry.filename) and entry.lineno is not None:
            return describe_line(entry.filename, entry.lineno, entry.name)
    return None


def raised_by_user(error: BaseException) -> bool:
    """Whether code of the step, and not of torch, raised `error`."""
    entries = traceback.extract_tb(error.__traceback__)
    return bool(entries) and is_user_file(entries[-1].filename)
