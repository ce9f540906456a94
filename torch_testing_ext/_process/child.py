"""The first steps of a process that we start, and its last: session, signals, output, exit."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from . import fork_safety, signals, system


def fork_child(run: Callable[[], object], killed_by: int = signal.SIGKILL) -> int:
    """Fork a child in a session of its own, which gets signal `killed_by` when this process dies. Returns its pid.

    The child runs `run`, which ends with os._exit, and holds signals back until it calls signals.unblock().
    """
    parent = os.getpid()
    with signals.blocked():
        pid = fork_safety.fork()
        if pid == 0:
            try:
                start_session(parent, killed_by)
                run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    return pid


def start_session(parent: int, killed_by: int) -> None:
    """Leave the terminal and the process group of `parent`, and get signal `killed_by` when it dies."""
    os.setsid()
    if killed_by != signal.SIGKILL:
        signal.signal(killed_by, signal.SIG_DFL)
    system.die_with(parent, killed_by)


def detach(stream: int | None) -> None:
    """Let go of what a process that runs tests inherited. `stream` becomes stdout and stderr; None keeps them."""
    _reset_signals()
    system.use_batch_scheduling()
    if stream is not None:
        _redirect(stream)
    _reset_multiprocessing()


def exit_now(code: int) -> NoReturn:
    """Exit at once: no atexit, no destructors of groups that wait for peers, no threads to join."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _reset_signals() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    # It has no terminal: Ctrl-C reaches its parent, which ends it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _redirect(stream: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, targets in ((null, (0,)), (stream, (1, 2))):
        for target in targets:
            os.dup2(source, target)
        if source not in targets:
            os.close(source)
    # New text layers: what the inherited ones hold (a test runner's capture, say) belongs to the parent.
    layers = {"stdin": open(0, closefd=False), "stdout": _text_layer(1), "stderr": _text_layer(2)}  # noqa: SIM115
    for name, layer in layers.items():
        setattr(sys, name, layer)
        setattr(sys, f"__{name}__", layer)


def _text_layer(fd: int) -> io.TextIOWrapper:
    # Line by line: what a process printed before it was killed is in its log.
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _reset_multiprocessing() -> None:
    """Forget the children and finalizers of the process we were forked from: they are not ours to join or run."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children.clear()
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
