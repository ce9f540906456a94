"""A rank, from the first instruction after its birth to its exit.

Born by a fork (`live`) or as a new interpreter (`main`), it does the same: cut itself off from what it inherited,
run the job's body, leave its account, exit without the interpreter's tear-down.
"""

from __future__ import annotations

import _thread
import faulthandler
import io
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch_testing_ext._process import system

from .job import Job
from .report import AccountFile, RankAccount, RankEnding, now

# Exit statuses. A failed test has 10 in PyTorch too.
PASSED, FAILED = 0, 10

# What the parent may ask of a rank, one byte each, and what the rank answers.
ASK_RECORDER, RECORDER_DONE = b"R", b"r"
STACKS_DONE = bytes([system.DUMP_STACKS])


class AccountWriter:
    """A rank's way to tell how its test ends. Failures are on disk at once; a pass only when all is over."""

    def __init__(self, pen: AccountFile | None):
        """Without a pen, the account is only kept here: a rank that is a thread has no need of files."""
        self._pen = pen
        self._pid = os.getpid()
        self.started = now()
        self.account: RankAccount | None = None
        self.finished = False  # the test itself is over; what follows is clean-up

    def failed(self, error: BaseException, assertion: bool, within: str = "") -> None:
        ending = RankEnding.FAILED if assertion else RankEnding.ERROR
        self._tell(RankAccount(ending, self.started, now(), within + summarize(error), format_error(error), FAILED))

    def skipped(self, reason: str, code: int) -> None:
        self._tell(RankAccount(RankEnding.SKIPPED, self.started, now(), reason, code=code))

    def passed(self, imported: tuple[str, ...] = ()) -> None:
        self._tell(RankAccount(RankEnding.PASSED, self.started, now(), imported=imported))

    def note(self, notes: Sequence[str]) -> None:
        """Add to what is told already."""
        assert self.account is not None
        self._write(replace(self.account, notes=(*self.account.notes, *notes)))

    def _tell(self, account: RankAccount) -> None:
        """Keep the first failure: what comes after it, in clean-up, follows from it or matters less."""
        if self.account is None or not self.account.ending.is_failure:
            self._write(account)

    def _write(self, account: RankAccount) -> None:
        self.account = account
        # A child that the test forked and let run on speaks for nobody.
        if self._pen is not None and os.getpid() == self._pid:
            self._pen.write(account)


def summarize(error: BaseException) -> str:
    """Type and first line of an exception, also of one whose str() fails."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as worse:
        return f"{name} (its str() raised {type(worse).__name__})"
    first = text.strip().partition("\n")[0]
    return f"{name}: {first}" if first else name


def format_error(error: BaseException) -> str:
    """The traceback as text, without the frames of this module."""
    tb = error.__traceback__
    while tb is not None and "__rank_frame__" in tb.tb_frame.f_globals:
        tb = tb.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, tb))
    except Exception:
        # Printing it failed (a __str__, __repr__ or __cause__ of its own): the frames alone are worth having.
        return "".join(traceback.format_tb(tb)) + summarize(error) + "\n"


__rank_frame__ = True


def live(job: Job, rank: int, pen: AccountFile, link: socket.socket, stream: int | None) -> NoReturn:
    """The whole life of a forked rank. `stream`: the descriptor for stdout and stderr, None to keep those it has."""
    code = FAILED
    try:
        cut_off(stream)
        _listen(job, rank, link)
        code = _run(job, rank, AccountWriter(pen))
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def main() -> NoReturn:
    """The life of a rank that is a new interpreter: `python -c "... rank.main()" FILE RANK PEN LINK PARENT`."""
    file, rank, pen_fd, link_fd, parent = sys.argv[1], *map(int, sys.argv[2:6])
    os.setsid()
    system.die_with(parent, signal.SIGKILL)
    job: Job = pickle.loads(Path(file).read_bytes())
    job.context.apply()
    stream = None if job.debug_rank == rank else 1
    live(job, rank, AccountFile(pen_fd), socket.socket(fileno=link_fd), stream)


def _run(job: Job, rank: int, report: AccountWriter) -> int:
    """Run the body; whatever way it ends, the account says it. Returns the exit status."""
    try:
        job.call(rank, report)
    except SystemExit as leaving:
        return _exit_status(leaving, report)
    except BaseException as error:
        report.failed(error, assertion=isinstance(error, AssertionError))
        return FAILED
    if report.account is None:
        report.passed()
    assert report.account is not None
    return report.account.code


def _exit_status(leaving: SystemExit, report: AccountWriter) -> int:
    """sys.exit() that nobody accounted for is an exit before the test finished: only its code speaks."""
    if report.account is not None:
        return report.account.code
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """Exit at once: no atexit, no destructors of groups that wait for peers, no threads to join."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def cut_off(stream: int | None) -> None:
    _reset_signals()
    system.use_batch_scheduling()
    if stream is not None:
        _redirect(stream)
    _reset_multiprocessing()


def _reset_signals() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    # A rank has no terminal of its own: Ctrl-C reaches the parent, who ends the rank.
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
    # Line by line: what a rank printed before it was killed is in its log.
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


def _listen(job: Job, rank: int, link: socket.socket) -> None:
    """Be ready to tell where we are: stacks on a signal, the flight recorder through a thread.

    The signal's chain ends in Python's own C-level handler, which writes its number to the wake-up descriptor:
    so the parent knows when the stacks are complete, even if this process holds the GIL in C for ever.
    """
    link.setblocking(False)
    stacks = os.open(job.stacks(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    # One that our parent registered would count as registered still, although the next line takes its handler away.
    faulthandler.unregister(system.DUMP_STACKS)
    signal.signal(system.DUMP_STACKS, lambda *_: None)
    signal.set_wakeup_fd(link.fileno(), warn_on_full_buffer=False)
    faulthandler.enable(file=stacks)
    faulthandler.register(system.DUMP_STACKS, file=stacks, all_threads=True, chain=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # our parent held some back until now
    # Not a threading.Thread: a test that counts or joins threads should not meet it.
    _thread.start_new_thread(_answer, (job.recorder(rank), link))


def _answer(target: Path, link: socket.socket) -> None:
    poll = select.poll()  # not select(), which refuses descriptors above 1023
    poll.register(link, select.POLLIN)
    while True:
        poll.poll()
        try:
            asked = link.recv(1)
        except BlockingIOError:
            continue
        except OSError:
            return
        if not asked:
            return  # the process that started us is gone
        with suppress(Exception):
            from torch_testing_ext import _torch

            target.write_text(_torch.flight_recorder())
        with suppress(OSError):
            link.send(RECORDER_DONE)
