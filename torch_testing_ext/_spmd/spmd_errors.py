"""`SPMDError`, and the search for the line of user code that caused it."""

import os
import traceback

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class SPMDError(ValueError):
    """The step, model or optimizer cannot be made data parallel. Model and optimizer are unchanged.

    `what` is the problem, `where` the line of user code that caused it ("file:line, in function: code"), and `remedy`
    says how to fix it.
    """

    def __init__(self, what: str, *, remedy: str, where: str | None = None) -> None:
        self.what, self.remedy, self.where = what, remedy, where
        super().__init__("\n".join(filter(None, [what, where and f"  at {where}", f"  {remedy}"])))


def check_choice(title: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise an error if `value` is none of `choices`."""
    if value not in choices:
        raise SPMDError(f"Unknown {title} {value!r}.", remedy=f"Use one of {', '.join(map(repr, choices))}.")


def user_line_of(error: BaseException) -> str | None:
    """The innermost line of user code in the traceback of `error`."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_user_file(entry.filename):
            return f"{entry.filename}:{entry.lineno}, in {entry.name}: {entry.line}"
    return None


def raised_by_user(error: BaseException) -> bool:
    """Has code of the step, and not of torch, raised `error`?"""
    entries = traceback.extract_tb(error.__traceback__)
    return bool(entries) and _is_user_file(entries[-1].filename)


def _is_user_file(filename: str) -> bool:
    return not filename.startswith((_TORCH, _PACKAGE, "<"))
