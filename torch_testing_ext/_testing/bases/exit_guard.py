"""The end of the process that has run tests."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

EXIT_FAILED = 1


# The other exec functions call one of these two.
_ENDING = ("_exit", "execv", "execve")


class ExitGuard:
    """Keeps a test from ending `python test_file.py` as if it had passed.

    Only the exit code of that process says how its tests ended, and os._exit(0) in a test, a tear-down or an atexit
    function would replace it. So this stands in for the functions of `os` that end or replace a process, from `install`
    to the end of the process. A child that a test forks ends as it likes. The runner needs no guard: it asks the
    processes of its tests whether everything was over.
    """

    def __init__(self) -> None:
        # The test or fixture that is running.
        self.running = ""
        # The exit code of the process, unless it exits with another; None while tests run.
        self.code: int | None = 0
        self._pid = os.getpid()
        self._originals = {name: getattr(os, name) for name in _ENDING}

    def install(self) -> None:
        stand_ins = {name: self._instead_of(name, original) for name, original in self._originals.items()}
        for name, stand_in in stand_ins.items():
            setattr(os, name, stand_in)

        def remove_in_child() -> None:
            for name, stand_in in stand_ins.items():
                # A test may have replaced it for a while.
                if getattr(os, name) is stand_in:
                    setattr(os, name, self._originals[name])

        os.register_at_fork(after_in_child=remove_in_child)

    def _instead_of(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make the stand-in for a function of `os` that ends or replaces the process."""

        def guarded(*arguments: Any, **options: Any) -> Any:
            # A child may still have it from before the fork, as the target of a Process.
            if os.getpid() != self._pid:
                return original(*arguments, **options)
            # A rank of a launcher that ends since it cannot go on has said why.
            if self.code is None and not _is_ours(sys._getframe(1)):
                self._explain(name)
            elif self.code is not None and name != "_exit":
                return original(*arguments, **options)
            status = options.get("status", 0)
            if name == "_exit" and arguments:
                status = arguments[0]
            code = EXIT_FAILED if self.code is None else self.code
            self._exit(status or code)

        return guarded

    def _exit(self, code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._originals["_exit"](code)
        raise AssertionError("the process has ended")

    def _explain(self, name: str) -> None:
        where = f" in {self.running}" if self.running else ""
        stack_of_caller = traceback.walk_stack(sys._getframe())
        frames = [(frame, line) for frame, line in stack_of_caller if not _is_ours(frame)]
        stack = "".join(reversed(traceback.StackSummary.extract(frames).format()))
        text = f"\nos.{name}() ended the tests before they were over{where}. It was called here:\n{stack}\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))


def _is_ours(frame: FrameType) -> bool:
    return "__unittest" in frame.f_globals or frame.f_globals.get("__name__", "").startswith("torch_testing_ext.")
