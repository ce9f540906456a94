"""Keeps a test from ending `python test_file.py` as if it had passed.

Only the exit code of that process says how its tests ended, and os._exit(0) in a test, a tear-down or an atexit
function would replace it. run_test.py needs no guard: it asks the processes of its tests whether everything was over.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

__unittest = True  # keeps these frames out of unittest's tracebacks

EXIT_FAILED = 1
_FUNCTIONS = ("_exit", "execv", "execve")  # the other exec functions call one of these two


class ExitGuard:
    """Stands in for the functions of `os` that end or replace a process, from `install` to the end of the process.

    A child that a test forks ends as it likes.
    """

    def __init__(self) -> None:
        self.running = ""  # the test or fixture that is running
        self.code: int | None = 0  # of the process, unless it exits with another; None while tests run
        self._pid = os.getpid()
        self._originals = {name: getattr(os, name) for name in _FUNCTIONS}

    def install(self) -> None:
        for name, original in self._originals.items():
            setattr(os, name, self._instead_of(name, original))

    def _instead_of(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            if os.getpid() != self._pid:
                return original(*arguments, **options)
            if self.code is None:
                self._explain(name)
            elif name != "_exit":
                return original(*arguments, **options)
            status = arguments[0] if name == "_exit" and arguments else options.get("status", 0)
            self._exit(status or (EXIT_FAILED if self.code is None else self.code))

        return guarded

    def _exit(self, code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._originals["_exit"](code)
        raise AssertionError("the process has ended")

    def _explain(self, name: str) -> None:
        where = f" in {self.running}" if self.running else ""
        frames = [one for one in traceback.walk_stack(sys._getframe()) if not _is_ours(one[0])]
        stack = "".join(reversed(traceback.StackSummary.extract(frames).format()))
        text = f"\nos.{name}() ended the tests before they were over{where}. It was called here:\n{stack}\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))


def _is_ours(frame: FrameType) -> bool:
    return "__unittest" in frame.f_globals or frame.f_globals.get("__name__", "").startswith("torch_testing_ext.")
