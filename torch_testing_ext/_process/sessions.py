"""The session, signals and streams of a process that we start."""

import io
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from os import _exit
from typing import NoReturn

from torch_testing_ext._process import fork_safety

from . import system
from .signals import blocked

# A run may have been started with any of these ignored (nohup, the background of a shell). Tests do not depend on that.
_AS_USUAL = (
    signal.SIGTERM,
    signal.SIGCHLD,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)

# The streams that this process, or the one that forked it, has made.
_layers: dict[str, io.TextIOWrapper] = {}


def fork_child(run: Callable[[], object], killed_by: int = signal.SIGKILL) -> int:
    """Fork a child in a session of its own. It gets signal `killed_by` when this process dies. Returns its pid.

    The child runs `run`, which ends with os._exit. Signals stay blocked in it until it calls `unblock`.
    """
    parent = os.getpid()
    # Otherwise both processes would write the buffered text.
    system.flush_streams()
    with blocked():
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
    """Leave the terminal and the process group of `parent`, and request signal `killed_by` for when it dies."""
    os.setsid()
    if killed_by != signal.SIGKILL:
        signal.signal(killed_by, signal.SIG_DFL)
    system.die_with(parent, killed_by)


def detach(stream: int | None, keeps_layers: bool = False) -> None:
    """Reset state inherited from the parent, in a process that runs tests.

    `stream` becomes stdout and stderr; None keeps them. `keeps_layers`: keep the objects of a parent that has called
    this, too, since modules that it has imported may hold them, as they hold those of pytest. Only where no thread of
    the parent prints: it may have locked one.
    """
    _reset_signals()
    system.use_batch_scheduling()
    if not keeps_layers:
        _layers.clear()
    if stream is not None:
        _redirect(stream)
    _reset_multiprocessing()


def leave_connections(own: int) -> None:
    """Leave the pipes and sockets that the parent has made to it, except `own`: their peers wait for their end.

    Objects of this process have their numbers, which become /dev/null. Those that a new program would inherit, as the
    standard streams, were given to the parent. The tracker of shared memory serves both.
    """
    kept = {own, *_descriptors_of_tracker()}
    null = os.open(os.devnull, os.O_RDWR)
    names: list[str] = []
    # Without /proc, they stay open.
    with suppress(OSError):
        names = os.listdir("/proc/self/fd")
    for fd in map(int, names):
        # The listing's own descriptor is closed.
        with suppress(OSError):
            is_inherited = os.get_inheritable(fd)
            if fd not in kept and not is_inherited and _is_connection(fd):
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def _descriptors_of_tracker() -> tuple[int, ...]:
    """The descriptor of multiprocessing's tracker of shared memory, if it runs."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    fd = None if module is None else module._resource_tracker._fd
    return () if fd is None else (fd,)


def _is_connection(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def exit_now(code: int) -> NoReturn:
    """Exit at once: no atexit, no destructors of groups that wait for peers, no threads to join."""
    with suppress(BaseException):
        system.flush_streams()
    _exit(code)


def _reset_signals() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in _AS_USUAL:
        signal.signal(number, signal.SIG_DFL)
    # This process has no terminal: Ctrl-C reaches its parent, which ends it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _redirect(stream: int) -> None:
    """Let /dev/null be stdin, and `stream` stdout and stderr."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, targets in ((null, (0,)), (stream, (1, 2))):
        for target in targets:
            os.dup2(source, target)
        if source not in targets:
            os.close(source)
    # Those of the parent's interpreter may hold buffered text, or be a test runner's capture.
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        layer = _layers.get(name)
        if layer is None or not _is_open(layer):
            layer = _layers[name] = _text_layer(fd)
        setattr(sys, name, layer)
        setattr(sys, f"__{name}__", layer)


def _text_layer(fd: int) -> io.TextIOWrapper:
    if fd == 0:
        return open(fd, encoding="utf-8", errors="surrogateescape", closefd=False)
    # Line buffered, so that the log has everything that a process printed before it was killed.
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _is_open(layer: io.TextIOWrapper) -> bool:
    # One whose buffer was taken away by `detach` raises.
    with suppress(ValueError):
        return not layer.closed
    return False


def _reset_multiprocessing() -> None:
    """Forget the children and finalizers of the process that forked this one, which must not join or run them."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children.clear()
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
