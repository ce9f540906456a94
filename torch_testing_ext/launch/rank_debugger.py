"""`breakpoint()` in a rank: the rank gets the user's terminal, and `rank 2` at its prompt changes the rank.

Imported when a rank stops for the first time.
"""

import _thread
import pdb
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from .terminal_turns import StopContext, Turns

# After a step, the rank keeps the terminal for so long: it may stop again at once. If it waits for others, they get it.
_KEEPS = 0.5
_OURS = str(Path(__file__).parents[1])
# The modules in which a rank waits, by their first name.
_LIBRARIES = frozenset({"torch", *sys.stdlib_module_names} - {"__main__"})


class RankDebugger(pdb.Pdb):
    """The debugger of one rank, which stops only while it has the terminal."""

    def __init__(self, context: StopContext):
        self._context = context
        self._rank = context.rank or 0
        self._world_size = context.world_size
        self._turns = Turns(context.directory, self._rank)
        self._has_it = False
        self._stops = 0
        self._mutex = threading.Lock()
        self.is_waiting = False
        # The failure at which it stops.
        self.failure = ""
        path = context.terminal.path
        stdin = open(path, encoding="utf-8")  # noqa: SIM115
        stdout = open(path, "w", encoding="utf-8")  # noqa: SIM115
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        self.prompt = "(Pdb) " if context.rank is None else f"(rank {context.rank}) "

    def interaction(self, frame: FrameType | None, *more: Any, **others: Any) -> None:
        self._take()
        if self.failure:
            self.message(f"\n{self.failure}")
            self.failure = ""
        try:
            super().interaction(frame, *more, **others)
        finally:
            self._leave()

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The stack from the test on, without the frames that have called it."""
        stack, current = super().get_stack(f, t)
        first = 0
        for number, (frame, _) in enumerate(stack[:current]):
            if _is_ours(frame.f_code):
                first = number + 1
        return stack[first:], current - first

    def _take(self) -> None:
        with self._mutex:
            self._stops += 1
            if self._has_it:
                return
        self.is_waiting = True
        is_first = self._turns.take()
        self._context.is_about_to_stop = False
        self.is_waiting = False
        self._has_it = True
        if is_first and self._world_size > 1:
            another = 1 if self._rank == 0 else 0
            self.message(f"Other ranks and all timeouts are paused. Type `rank {another}` to switch to rank {another}.")

    def _leave(self) -> None:
        if sys.gettrace() is None:
            self._give_up(self._stops, 0.0)
        else:
            _thread.start_new_thread(self._give_up, (self._stops, _KEEPS))

    def _give_up(self, stops: int, later: float) -> None:
        time.sleep(later)
        with self._mutex:
            if self._has_it and self._stops == stops:
                self._has_it = False
                self._turns.leave()

    def do_rank(self, arg: str) -> None:
        """rank N: look at another rank, and come back when that goes on, or by `rank` there."""
        known = [str(rank) for rank in range(self._world_size)]
        if arg.strip() not in known:
            self.error(f"rank N, where N is one of {', '.join(known)}; this is rank {self._rank}")
        elif int(arg) != self._rank:
            if not self._turns.give(int(arg)):
                self.error(f"rank {arg.strip()} has ended")
                return
            self.is_waiting = True
            self._turns.take()
            self._context.is_about_to_stop = False
            self.is_waiting = False
            self.print_stack_entry(self.stack[self.curindex])


class _Look(RankDebugger):
    """A look at the main thread of a rank that has not stopped, but waits for something. It cannot be stepped."""

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The stack from the test on, at the line of the test or its project: torch's own are below, by `d`."""
        stack, current = super().get_stack(f, t)
        own = [number for number, (frame, _) in enumerate(stack) if not _is_of_library(frame)]
        return stack, own[-1] if own else current

    def do_continue(self, arg: str) -> bool:
        return True

    do_c = do_cont = do_step = do_s = do_next = do_n = do_return = do_r = do_until = do_quit = do_q = do_continue

    def interaction(self, frame: FrameType | None, *more: Any, **others: Any) -> None:
        self._has_it = self._turns.take_if_called()
        if not self._has_it:
            return
        self.reset()
        self.failure = f"rank {self._rank} has not stopped: this is where it is. `c` goes back."
        super().interaction(frame, *more, **others)


def _debugger_of(context: StopContext) -> RankDebugger:
    debugger: RankDebugger = context.debugger or RankDebugger(context)
    context.debugger = debugger
    return debugger


def stop(context: StopContext, frame: FrameType) -> None:
    """Stop in a frame, at its next line."""
    _debugger_of(context).set_trace(frame)


def look(context: StopContext) -> None:
    """The user has called for this rank: unless it waits for the terminal, show where its main thread is."""
    debugger = context.debugger
    if debugger is not None and (debugger.is_waiting or debugger._has_it):
        return
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None:
        _Look(context).interaction(frame, None)


def look_at_failure(context: StopContext, error: BaseException) -> None:
    """Stop where an exception was raised."""
    traceback = _without_ours(error.__traceback__)
    if traceback is None:
        return
    debugger = _debugger_of(context)
    debugger.reset()
    debugger.failure = f"{type(error).__name__}: {error}"
    debugger.interaction(None, traceback)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and _is_ours(traceback.tb_frame.f_code):
        traceback = traceback.tb_next
    return traceback


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


def _is_of_library(frame: FrameType) -> bool:
    return _is_ours(frame.f_code) or str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def stop_in_test(context: StopContext) -> None:
    """Stop at the first line of the test: of the first function with such a name that is called."""

    def look_for_test(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if event != "call" or not code.co_name.startswith("test") or _is_ours(code):
            return None
        sys.settrace(None)
        stop(context, frame)
        return frame.f_trace

    sys.settrace(look_for_test)
