"""Child processes: fork safety, start, signals, the event loop that waits for them, their end."""

import ctypes
import faulthandler
import io
import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

from . import own_imports, system

# --------------------------------------------------------------------------------------------------------------------
# Grace periods: how long others may go on after an event, in seconds. One number for each situation.
#
# docs/explanation/ranks.md lists those after the end of a rank. A time-out for an answer is beside what waits for it.

# Peers of a dead rank fail within 0.02 s; on a loaded machine, ten times that. A death must be reported within 1 s.
AFTER_DEATH = 0.4
# Other ranks may be about to fail for reasons of their own, which are worth reporting together with the first.
AFTER_FAILURE = 1.0
# Threads cannot be ended, and processes of a launcher cannot be replaced, so more tests fail than this one.
AFTER_FAILURE_FOR_GOOD = 5.0
# One rank has skipped, others run: they may skip too, or wait for it in vain.
AFTER_SKIP = 5.0
# A helper process that exits right after its test is not a leak.
FOR_HELPERS = 0.1
# Before SIGKILL.
AFTER_SIGTERM = 0.2
# Milliseconds are enough, unless the machine is busy; a rank that holds the GIL in C never writes its flight recorder.
FOR_STACKS = 3.0
FOR_STACKS_AFTER_DEATH = 0.3


# --------------------------------------------------------------------------------------------------------------------
# Signals: read as data by an event loop, blocked around a fork, sent to whole process groups.

# A child that is forked while these are blocked receives none of them before it has handlers of its own.
_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, system.DUMP_STACKS, system.DUMP_STACKS_NOW}


@contextmanager
def blocked() -> Iterator[None]:
    """Block signals around a fork; a child unblocks them when it is ready (`unblock`).

    With its parent's handlers the child would write a signal's number to the parent's wake-up descriptor, and the
    parent would take it for a signal of its own; or Ctrl-C would unwind into the test runner in both processes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def keep_exit_codes() -> None:
    """Have the exit codes of children kept: where SIGCHLD is ignored, subprocess takes every child for a success."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class SignalReader:
    """Signals as data: a descriptor becomes readable when one of `numbers` arrives, and `read` returns which.

    No handler interrupts other code. Must be made in the main thread.
    """

    def __init__(self, numbers: Iterable[int]):
        self._reading, self._writing = os.pipe()
        for fd in (self._reading, self._writing):
            os.set_blocking(fd, False)
        self._handlers: dict[int, Any] = {}
        for number in numbers:
            self._handlers[number] = signal.signal(number, _do_nothing)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._reading

    def read(self) -> list[int]:
        """The signals that have arrived since the last call, in order of arrival."""
        arrived = b""
        with suppress(BlockingIOError):
            while data := os.read(self._reading, 4096):
                arrived += data
        return [number for number in arrived if number in self._handlers]

    def close(self) -> None:
        """Restore the handlers that were set before."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._close_descriptors()

    def abandon(self) -> None:
        """Stop reading, in a forked child: the signals of its parent do not concern it."""
        signal.set_wakeup_fd(-1)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler: the number has been written to the wake-up descriptor before it is called."""


def signal_group(pid: int, number: int) -> None:
    """Signal a process group by its leader, or the process alone if it has not made its group yet."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


# --------------------------------------------------------------------------------------------------------------------
# Commands that start a new interpreter: for a module of this package, and a program that ends with this process.

# Code that each of these interpreters runs before it imports any test, and passes on to those that it starts.
RUN_FIRST: list[str] = []


def command(module: str, path: Sequence[object], *words: str) -> list[str]:
    """The command for an interpreter like this one that runs `main()` of a module of this package.

    `path` becomes its sys.path.
    """
    # Python ignores entries of sys.path that are not strings, and their repr might not be a literal.
    entries = [entry for entry in path if isinstance(entry, str)]
    run = f"from torch_testing_ext.{module} import main; main()"
    # With nothing in front of Python's library that may hide a part of it.
    begin = f"import sys; sys.path[:] = {own_imports.library_first(entries)!r}; import torch_testing_ext"
    code = "; ".join([begin, f"sys.path[:] = {entries!r}", *RUN_FIRST, run])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code, *words]


def tethered(words: Sequence[str]) -> list[str]:
    """The command that runs `words`, which get SIGTERM when this process ends, however it does."""
    parent = str(os.getpid())
    return command("_process.child_processes", sys.path, parent, *words)


def main() -> None:
    """Become a tethered program: `PARENT COMMAND...` as words."""
    parent, *words = sys.argv[1:]
    # Whatever was inherited: an ignored signal survives exec.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    unblock()
    system.die_with(int(parent), signal.SIGTERM)
    os.execvp(words[0], words)


# --------------------------------------------------------------------------------------------------------------------
# The event loop: readable descriptors, timers, work for when nothing else is to be done, and children that end.

# Not epoll: a forked child would share it with its parent.
_Selector = selectors.PollSelector
# Seconds of one wait: poll takes milliseconds of 31 bits.
_LONGEST = 1e6


class Timer:
    """A call that is due at a time of time.monotonic(), unless it is cancelled before."""

    def __init__(self, at: float, call: Callable[[], object]):
        self.at = at
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class EventLoop:
    """Calls back when a descriptor becomes readable or a timer is due, one callback at a time."""

    def __init__(self) -> None:
        self._selector = _Selector()
        self._timers: list[Timer] = []
        self._idle: deque[Callable[[], object]] = deque()

    def listen(self, source: Any, call: Callable[[], object]) -> None:
        """Call whenever `source`, a descriptor or an object with a fileno(), is readable."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def serve(self, channel: Any, on_message: Callable[[Any], object], on_end: Callable[[], object]) -> None:
        """Call with each message that a channel receives; at its end, stop listening to it and call `on_end`."""

        def receive() -> None:
            try:
                received = channel.receive()
            except (EOFError, OSError):
                self.forget(channel)
                on_end()
                return
            for message in received:
                on_message(message)

        self.listen(channel, receive)

    def forget(self, source: Any) -> None:
        """Stop listening to `source`, if this loop listens to it."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def at(self, moment: float, call: Callable[[], object]) -> Timer:
        """Call once when time.monotonic() has reached `moment`."""
        timer = Timer(moment, call)
        self._timers.append(timer)
        return timer

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call once when that many seconds have passed."""
        return self.at(time.monotonic() + seconds, call)

    def when_idle(self, call: Callable[[], object]) -> None:
        """Call once when nothing else is to be done; in the order of the requests, one at a time."""
        self._idle.append(call)

    def drop_idle(self) -> None:
        self._idle.clear()

    def step(self, until: float | None = None) -> bool:
        """Wait for the next event and call back. Returns False if the time `until` came first."""
        ready = self._selector.select(self._seconds_until(until))
        for key, _ in ready:
            # A callback before this one may have stopped listening to the descriptor.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        happened = self._call_due_timers() or bool(ready)
        if not happened and self._idle:
            call = self._idle.popleft()
            call()
            return True
        return happened

    def _seconds_until(self, until: float | None) -> float | None:
        if self._idle:
            return 0.0
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        moments = [timer.at for timer in self._timers]
        if until is not None:
            moments.append(until)
        if not moments:
            return None
        seconds = min(moments) - time.monotonic()
        return min(max(0.0, seconds), _LONGEST)

    def _call_due_timers(self) -> bool:
        now = time.monotonic()
        due = [timer for timer in self._timers if timer.at <= now and not timer.cancelled]
        self._timers = [timer for timer in self._timers if timer.at > now]
        for timer in sorted(due, key=lambda timer: timer.at):
            if not timer.cancelled:
                timer.call()
        return bool(due)

    def close(self) -> None:
        self._selector.close()


def wait_readable(source: Any, until: float | None = None) -> bool:
    """Wait until one descriptor is readable. Returns False if the time `until` came first."""
    with _Selector() as selector:
        selector.register(source, selectors.EVENT_READ)
        seconds = None if until is None else max(0.0, until - time.monotonic())
        return bool(selector.select(seconds))


class ParentLoop(EventLoop):
    """Calls back when children have ended, and stops at SIGTERM. Ctrl-C is for the process that has the terminal."""

    def __init__(self, on_children_ended: Callable[[], object] = lambda: None):
        super().__init__()
        self.running = False
        self.on_children_ended = on_children_ended
        self._signals = SignalReader((signal.SIGCHLD, signal.SIGTERM))
        self.listen(self._signals, self._on_signals)

    def run(self) -> None:
        """Run until `stop` is called or SIGTERM arrives."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A child may be asked where it is before it has a handler for that: the question must not kill it.
        signal.signal(system.DUMP_STACKS, signal.SIG_IGN)
        signal.signal(system.DUMP_STACKS_NOW, signal.SIG_IGN)
        unblock()
        self.running = True
        while self.running:
            self.step()

    def stop(self) -> None:
        self.running = False

    def abandon(self) -> None:
        """In a forked child, which has no use for the signals of its parent."""
        self._signals.abandon()

    def _on_signals(self) -> None:
        if signal.SIGTERM in self._signals.read():
            self.stop()
        else:
            self.on_children_ended()


# --------------------------------------------------------------------------------------------------------------------
# The ends of processes: waiting for them, bringing them about, and describing them.


def reap() -> Iterator[tuple[int, int]]:
    """Each child that has ended, with its wait status."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, status


def wait_for_exit(pid: int) -> int | None:
    """Wait for a child. Returns its exit code, negative for a signal; None if its status has been taken already."""
    try:
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return None


def wait_and_end_group(pid: int) -> int | None:
    """Wait for a child, and end what it has left running in its group. Returns the same as `wait_for_exit`."""
    with suppress(ChildProcessError):
        # Its number stays its own until its status is taken.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        signal_group(pid, signal.SIGKILL)
    return wait_for_exit(pid)


def has_ended(pid: int, timeout: float) -> bool:
    """Wait at most `timeout` seconds for a process to end, without reaping it."""
    gone = os.pidfd_open(pid)
    try:
        return wait_readable(gone, time.monotonic() + timeout)
    finally:
        os.close(gone)


def wait_until_gone(pids: list[int], timeout: float = 1.0) -> None:
    """Wait at most `timeout` seconds until processes that were killed have ended, and reap those that are children."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        # The process may be gone already, and some systems have no pidfd_open.
        with suppress(OSError, AttributeError):
            has_ended(pid, deadline - time.monotonic())
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def escalate(
    have_ended: Callable[[float], bool], send: Callable[[int], object], *, by_itself: float = 0.0, after_sigterm: float
) -> None:
    """End processes: SIGTERM to those that do not end by themselves in so many seconds, and SIGKILL after some more.

    `have_ended` waits for them at most that long; `send` sends them a signal.
    """
    if have_ended(by_itself):
        return
    send(signal.SIGTERM)
    if not have_ended(after_sigterm):
        send(signal.SIGKILL)


def end(process: subprocess.Popen[Any], *, by_itself: float = 0.0, after_sigterm: float) -> int:
    """End a process in this way, and at once if the user interrupts that. Returns its exit code."""

    def has_ended(seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode is not None

    try:
        escalate(has_ended, process.send_signal, by_itself=by_itself, after_sigterm=after_sigterm)
    except KeyboardInterrupt:
        process.kill()
        raise
    return process.wait()


def how_it_ended(process: subprocess.Popen[Any], timeout: float) -> str | None:
    """The end of a process, in words, to follow a subject; None if it has not ended in time."""
    try:
        return describe_exit(process.wait(timeout))
    except subprocess.TimeoutExpired:
        return None


def end_children(kept: Container[int] = ()) -> list[str]:
    """Kill all children of this process except `kept`, and the orphans it then adopts. Returns their descriptions."""
    descriptions = []
    while others := [pid for pid in system.children(os.getpid()) if pid not in kept]:
        for pid in others:
            if not system.is_ending(pid):
                descriptions.append(system.describe(pid))
            signal_group(pid, signal.SIGKILL)
        for pid in others:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return descriptions


# -- in words


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 70` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int | None, when: str = "", *, as_participle: bool = False) -> str:
    """Describe the end of a process as a predicate: `was killed by SIGKILL 0.3 s into test_x (out of memory?)`.

    `code` is negative for a signal, and None if the exit status is unknown. `when` begins with a space.
    `as_participle`: without `was`.
    """
    if code is None:
        return f"ended in an unknown way{when}"
    if code >= 0:
        return f"exited with code {code}{when}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    verb = "killed" if as_participle else "was killed"
    return f"{verb} by {signal_name(-code)}{when}{hint}"


# --------------------------------------------------------------------------------------------------------------------
# Checks whether this process is safe to fork: a forked child has only the thread that forked it.
#
# Locks that the other threads held stay locked in the child. There are two checks. The one before the fork ends the
# threads that can be ended and reports the others that Python knows of. The one after the fork counts native threads:
# numpy's OpenBLAS stops its threads in a fork handler, so a thread that is still there after a fork existed during
# it.

_OMP_PAUSE_HARD = 2
# pytest's plugins whose threads a forked child does without: a thread that waits holds no lock but its own.
_PLUGINS_WITH_THREADS = ("pytest_rerunfailures", "pytest_timeout")
# pytest-xdist's workers read what their controller sends in a thread of execnet's, which `threading` does not know.
_READER_OF_A_WORKER = os.path.join("execnet", "gateway_base.py")
# The thread of NVIDIA's driver that waits for events, from the first use of NVML on (580): a child starts its own.
_OF_THE_DRIVER = re.compile("cuda[0-9a-f]{11}")
# Seconds for a thread that has been joined to leave the process; there is no event for that.
_ENDING = 1.0
_torch_has_threads = False
# The process that is known not to lack any thread.
_safe_pid = os.getpid()


def prepare_to_fork() -> str | None:
    """Make this process safe to fork if possible. Returns the reason if it is not, or None."""
    if not system.CAN_FORK:
        return "this platform cannot fork safely"
    if threading.current_thread() is not threading.main_thread():
        # The parent-death signal is sent when the thread that forked the child ends, not the whole process.
        return "ranks are being started from a thread that is not the main one"
    others = other_threads()
    if others:
        return f"it runs other threads ({', '.join(others[:3])})"
    if system.threads() > 1:
        release_openmp()
        # pytest's `faulthandler_timeout` has a thread of its own for each test. Ranks have a time limit.
        faulthandler.cancel_dump_traceback_later()
    return None


def other_threads() -> list[str]:
    """The names of Python's threads that a forked child would miss."""
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main]
    return [thread.name for thread in others if not _is_of_plugin(thread)]


def _is_of_plugin(thread: threading.Thread) -> bool:
    function = getattr(thread, "function", None) or getattr(thread, "_target", None)
    return getattr(function, "__module__", "") in _PLUGINS_WITH_THREADS


def _readers_of_a_worker() -> int:
    """Count the threads in which workers of pytest-xdist read."""
    known = {thread.ident for thread in threading.enumerate()}
    readers = 0
    for ident, frame in sys._current_frames().items():
        if ident not in known:
            readers += _outermost(frame).co_filename.endswith(_READER_OF_A_WORKER)
    return readers


def _outermost(frame: FrameType) -> CodeType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


def was_forked() -> str | None:
    """Return the reason why a process that was itself forked is not safe to fork; None if it was not forked.

    It may lack threads that its libraries count on: OpenMP would wait for them.
    """
    return None if os.getpid() == _safe_pid else "it was itself forked and lacks the threads of its parent"


def mark_fork_safe() -> None:
    """Mark this process, a forked child, as safe to fork: its parent was checked, so it lacks no thread."""
    global _safe_pid
    _safe_pid = os.getpid()
    # torch replaces its pool of threads at the next use, and aborts if that is in several threads (2.11 to 2.15).
    torch = sys.modules.get("torch")
    # A module that is still being imported may have no such function yet.
    get_num_threads = getattr(torch, "get_num_threads", None)
    has_one = get_num_threads is not None and get_num_threads() == 1
    if _torch_has_threads or has_one:
        _have_torch_start_its_threads()


def check_by_fork() -> str | None:
    """Make this process safe to fork if possible, and check that by a fork, in which libraries end their threads."""
    unsafe = prepare_to_fork()
    if unsafe is None and system.threads() > 1:
        _threads_of_a_child(lambda: None)
    return unsafe or check_after_fork()


def check_after_fork() -> str | None:
    """Check, right after a fork, whether this process was safe to fork. Returns the reason if it was not, or None.

    A second child serves as a probe. Threads that the child has, or gets back when it asks for them, are not missed:
    torch's pthreadpool notices a fork and starts its threads again. This process asks, too: or they would stand for
    others. Nor are threads missed that end: one that has been joined stays in the process for a moment.
    """
    if _threads_that_count() <= 1:
        return None
    _have_torch_start_its_threads()
    of_child = _threads_of_a_child(_have_torch_start_its_threads)
    until = time.monotonic() + _ENDING
    missing = _threads_that_count() - of_child
    while missing > 0 and time.monotonic() < until:
        time.sleep(0.001)
        missing = _threads_that_count() - of_child
    if missing <= 0:
        return None
    names = ", ".join(system.names_of_threads()[:3])
    in_brackets = f" ({names})" if names else ""
    return f"it runs {missing} native threads that a forked child would miss{in_brackets}"


def _threads_that_count() -> int:
    """Count the threads of this process, but for those that a child does not miss."""
    of_driver = sum(bool(_OF_THE_DRIVER.fullmatch(name)) for name in system.names_of_threads())
    of_plugins = sum(_is_of_plugin(thread) for thread in threading.enumerate())
    return system.threads() - of_driver - of_plugins - _readers_of_a_worker()


def _threads_of_a_child(first: Callable[[], None]) -> int:
    pid = fork()
    if pid == 0:
        first()
        os._exit(min(system.threads(), 255))
    # None where SIGCHLD is ignored: there are no exit statuses then.
    return wait_for_exit(pid) or 0


def _have_torch_start_its_threads() -> None:
    global _torch_has_threads
    _torch_has_threads = True
    torch = sys.modules.get("torch")
    with suppress(Exception):
        if torch is not None:
            torch.set_num_threads(torch.get_num_threads())


def fork() -> int:
    """os.fork() without Python 3.12's warning about threads.

    Python counts threads before the fork handlers run; check_after_fork() counts them afterwards.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def release_openmp() -> None:
    """End OpenMP's idle worker threads, which a forked child would wait for. OpenMP restarts them when needed."""
    for name in ("libgomp", "libomp", "libiomp5"):
        path = system.loaded_library(name)
        if path is None:
            continue
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_HARD)


# --------------------------------------------------------------------------------------------------------------------
# The beginning and exit of a process that we start: session, signals, output, exit.

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


def fork_child(run: Callable[[], object], killed_by: int = signal.SIGKILL) -> int:
    """Fork a child in a session of its own. It gets signal `killed_by` when this process dies. Returns its pid.

    The child runs `run`, which ends with os._exit. Signals stay blocked in it until it calls `unblock`.
    """
    parent = os.getpid()
    # Otherwise both processes would write the buffered text.
    system.flush_streams()
    with blocked():
        pid = fork()
        if pid == 0:
            try:
                start_session(parent, killed_by)
                run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    return pid


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder that is removed at the end, also if this process is killed: then, when its forks have ended."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    read, write = os.pipe()
    with blocked():
        keeper = fork()
        if keeper == 0:
            with suppress(BaseException):
                os.setsid()
                os.close(write)
                # This process and its forks have the other end.
                os.read(read, 1)
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
    os.close(read)
    try:
        yield folder
    finally:
        # A program that waits for all of its children may have taken its status.
        with suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)
        wait_for_exit(keeper)
        os.close(write)
        shutil.rmtree(folder, ignore_errors=True)


def start_session(parent: int, killed_by: int) -> None:
    """Leave the terminal and the process group of `parent`, and request signal `killed_by` for when it dies."""
    os.setsid()
    if killed_by != signal.SIGKILL:
        signal.signal(killed_by, signal.SIG_DFL)
    system.die_with(parent, killed_by)


def detach(stream: int | None) -> None:
    """Reset state inherited from the parent, in a process that runs tests.

    `stream` becomes stdout and stderr; None keeps them.
    """
    _reset_signals()
    system.use_batch_scheduling()
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


def current_coverage() -> Any:
    """The `Coverage` that measures this process; None if there is none, or if its release cannot say so."""
    module = sys.modules.get("coverage")
    current = getattr(getattr(module, "Coverage", None), "current", None)
    return None if current is None else current()


def exit_now(code: int) -> NoReturn:
    """Exit at once: no atexit, no destructors of groups that wait for peers, no threads to join."""
    with suppress(BaseException):
        system.flush_streams()
    os._exit(code)


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
    # New text layers: the inherited ones may hold buffered text, or a test runner's capture, of the parent.
    layers = {
        "stdin": open(0, encoding="utf-8", errors="surrogateescape", closefd=False),  # noqa: SIM115
        "stdout": _text_layer(1),
        "stderr": _text_layer(2),
    }
    for name, layer in layers.items():
        setattr(sys, name, layer)
        setattr(sys, f"__{name}__", layer)


def _text_layer(fd: int) -> io.TextIOWrapper:
    # Line buffered, so that the log has everything that a process printed before it was killed.
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _reset_multiprocessing() -> None:
    """Forget the children and finalizers of the process that forked this one, which must not join or run them."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children.clear()
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
