"""What the compiler says when it cannot, or will not, turn a step into a data-parallel program."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep


class SPMDError(ValueError):
    """A step, model or optimizer that cannot be made data parallel. Model and optimizer are as they were.

    `where` is the line of the user's that led here ("file:line, in function: code"), `remedy` what to do about it.
    """

    def __init__(self, what: str, *, remedy: str, where: str | None = None) -> None:
        self.what, self.remedy, self.where = what, remedy, where
        super().__init__("\n".join(filter(None, [what, where and f"  at {where}", f"  {remedy}"])))


def _is_users(filename: str) -> bool:
    return not filename.startswith((_TORCH, _OURS, "<"))


def line_of(filename: str, lineno: int, function: str) -> str:
    code = linecache.getline(filename, lineno).strip()
    return f"{filename}:{lineno}, in {function}: {code}"


def users_line(frame: FrameType | None = None) -> str | None:
    """The innermost line on the stack that is neither torch's nor ours."""
    at: FrameType | None = frame or sys._getframe(1)
    while at is not None:
        if _is_users(at.f_code.co_filename):
            return line_of(at.f_code.co_filename, at.f_lineno, at.f_code.co_name)
        at = at.f_back
    return None


def users_line_of(error: BaseException) -> str | None:
    """The innermost line of the user's in the traceback of `error`."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(entry.filename) and entry.lineno is not None:
            return line_of(entry.filename, entry.lineno, entry.name)
    return None
