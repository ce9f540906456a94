"""Stops a rank for the user: at `breakpoint()`; if asked to, at failures and where a test begins, too.

The same for the process of a test under the runner, which is no rank.
"""

import bdb
import os
import sys
from functools import partial
from typing import Any

from . import turns
from .turns import StopContext


class CannotStop(RuntimeError):
    """`breakpoint()` was called where no debugger has a terminal."""


_here: StopContext | None = None
_NO_FAILURES = (CannotStop, bdb.BdbQuit, KeyboardInterrupt, SystemExit)
_SKIPS = ("SkipTest", "Skipped")  # of unittest and of pytest, which this package does not import


def prepare(here: StopContext) -> None:
    """Have `breakpoint()` ask for the user's terminal, unless the user has chosen another debugger."""
    global _here
    _here = here
    if here.terminal.is_chosen:
        sys.settrace(None)  # of the process that this one was forked off
    hook: Any = sys.breakpointhook
    is_ours = getattr(hook, "func", None) is _stop
    if "PYTHONBREAKPOINT" in os.environ or (hook is not sys.__breakpointhook__ and not is_ours):
        return
    sys.breakpointhook = hook = partial(_stop, here)
    if "pdb" in sys.modules:
        sys.modules["pdb"].set_trace = hook  # type: ignore[attr-defined]


def _stop(here: StopContext, *arguments: Any, **options: Any) -> None:
    if not here.terminal.path:
        raise CannotStop(f"breakpoint(){here} cannot stop: {here.terminal.why_not}")
    turns.about_to_stop = True
    from . import rank_debugger

    rank_debugger.stop(here, sys._getframe(1))


def at_failure(error: BaseException) -> None:
    """The test has raised an exception of its own."""
    if _here is None or not _here.terminal.is_chosen or isinstance(error, _NO_FAILURES):
        return
    if not any(kind.__name__ in _SKIPS for kind in type(error).__mro__):
        from . import rank_debugger

        rank_debugger.look_at_failure(_here, error)


def at_test() -> None:
    if _here is not None and _here.terminal.stop_in is not None and _here.terminal.stop_in == (_here.rank or 0):
        from . import rank_debugger

        rank_debugger.stop_in_test(_here)


def called(here: StopContext) -> None:
    """The user asks for this rank."""
    if turns.about_to_stop:
        return
    from . import rank_debugger

    rank_debugger.look(here)
