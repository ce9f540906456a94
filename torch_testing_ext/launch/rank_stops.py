"""Stops of a rank for the user: at `breakpoint()`; if asked to, at failures and where a test begins, too."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from torch_testing_ext.launch.terminal_turns import StopContext


class CannotStop(RuntimeError):
    """`breakpoint()` was called where no debugger has a terminal."""


_context: StopContext | None = None


_NO_FAILURES = (CannotStop, KeyboardInterrupt, SystemExit)


# Exceptions of unittest, of pytest, and of a debugger, which this package does not import.
_NO_FAILURES_OF_OTHERS = ("SkipTest", "Skipped", "BdbQuit")


def prepare(context: StopContext) -> None:
    """Have `breakpoint()` ask for the user's terminal, unless the user has chosen another debugger."""
    global _context
    _context = context
    if context.terminal.is_chosen:
        # The trace function of the process that this one was forked off.
        sys.settrace(None)
    hook: Any = sys.breakpointhook
    is_ours = getattr(hook, "func", None) is _stop
    if "PYTHONBREAKPOINT" in os.environ or (hook is not sys.__breakpointhook__ and not is_ours):
        return
    sys.breakpointhook = hook = partial(_stop, context)
    if "pdb" in sys.modules:
        sys.modules["pdb"].set_trace = hook  # type: ignore[attr-defined]


def _stop(context: StopContext, *arguments: Any, **options: Any) -> None:
    if not context.terminal.path:
        raise CannotStop(f"breakpoint(){context} cannot stop: {context.terminal.why_not}")
    context.is_about_to_stop = True
    from . import rank_debugger

    rank_debugger.stop(context, sys._getframe(1))


def at_failure(error: BaseException) -> None:
    """The test has raised an exception of its own."""
    if _context is None or not _context.terminal.is_chosen or isinstance(error, _NO_FAILURES):
        return
    if not any(kind.__name__ in _NO_FAILURES_OF_OTHERS for kind in type(error).__mro__):
        from . import rank_debugger

        rank_debugger.look_at_failure(_context, error)


def at_test() -> None:
    if _context is None:
        return
    own_rank = _context.rank or 0
    if _context.terminal.stop_in == own_rank:
        from . import rank_debugger

        rank_debugger.stop_in_test(_context)


def called(context: StopContext) -> None:
    """The user asks for this rank."""
    if context.is_about_to_stop:
        return
    from . import rank_debugger

    rank_debugger.look(context)
