"""The process of a rank, from its first instruction to its exit.

Forked (`run_and_exit`) or a new interpreter (`main`), a rank resets inherited state, runs the job's body, writes its
account, and exits without the interpreter's tear-down.
"""

from __future__ import annotations

import _thread
import faulthandler
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

from torch_testing_ext._process import child, descriptors, signals, system
from torch_testing_ext._process.logs import cut_middle

from . import device_memory, recording
from .accounts import AccountFile, OwnWarning, RankAccount, RankEnding
from .causes import cause_in, cause_of
from .job import Job
from .report import now

# Exit statuses. PyTorch also uses 10 for a failed test.
PASSED, FAILED = 0, 10
# Characters of a summary. The traceback has all of the exception.
LONGEST_SUMMARY = 2_000

__rank_frame__ = True
__first_frames__ = ("_run", "_answer")

# The parent's requests to a rank, and the rank's answers: one byte each. A look has no answer but its file.
ASK_RECORDER, RECORDER_DONE = b"R", b"r"
ASK_COLLECTIVES = b"C"
STACKS_DONE = bytes([system.DUMP_STACKS])


class AccountWriter:
    """Writes how the test of a rank ends: a failure at once, a pass only when everything is over."""

    def __init__(self, file: AccountFile | None):
        """Without a file the account is kept only in memory: a rank that is a thread needs no file."""
        self._file = file
        self._pid = os.getpid()
        self._warnings: list[OwnWarning] = []
        self.started = now()
        self.account: RankAccount | None = None
        self.finished = False  # the test itself is over; only clean-up follows

    def failed(self, error: BaseException, assertion: bool, within: str = "", traceback: str | None = None) -> None:
        """Record that the test raised `error`. `assertion`: is it a failed assertion? `within` begins the summary.

        `traceback`: the text that shows where it was raised, if a test framework has a better one.
        """
        ending = RankEnding.FAILED if assertion else RankEnding.ERROR
        text = format_error(error) if traceback is None else traceback
        summary = within + summarize(error)
        self._record(RankAccount(ending, self.started, now(), summary, text, FAILED, cause=cause_of(error)))

    def failed_with(self, summary: str, traceback: str) -> None:
        """Record an exception of which only the texts are known."""
        cause = cause_in(summary)
        self._record(RankAccount(RankEnding.ERROR, self.started, now(), summary, traceback, FAILED, cause=cause))

    def provisionally_passed(self) -> None:
        """Write a pass that counts if the rank now ends by os._exit(0), and is overwritten if it ends otherwise."""
        if self.account is None:
            self._put(RankAccount(RankEnding.PASSED, self.started, now()))

    def retract(self) -> None:
        """Remove a provisional pass: the test runs again."""
        if self.account is None and self._file is not None and os.getpid() == self._pid:
            self._file.clear()

    def skipped(self, reason: str, code: int) -> None:
        self._record(RankAccount(RankEnding.SKIPPED, self.started, now(), reason, code=code))

    def passed(self, imported: tuple[str, ...] = ()) -> None:
        self._record(RankAccount(RankEnding.PASSED, self.started, now(), imported=imported))

    def note(self, notes: Sequence[str]) -> None:
        """Add notes to the account that has been written."""
        assert self.account is not None
        self._write(replace(self.account, notes=(*self.account.notes, *notes)))

    def warn(self, warnings: Sequence[OwnWarning]) -> None:
        """Add warnings to the account, whether it has been written or not."""
        self._warnings += warnings
        if self.account is not None:
            self._write(replace(self.account, warnings=tuple(self._warnings)))

    def attach(self, collectives: bytes) -> None:
        """Add what the rank has issued to the account that has been written. On a full disk it is not compared."""
        if not collectives or self.account is None or self._file is None or os.getpid() != self._pid:
            return
        if self._file.is_open():
            with suppress(OSError):
                self._file.attach(collectives)

    def _record(self, account: RankAccount) -> None:
        """Keep the first failure: a later one, in clean-up, follows from it or matters less."""
        if self.account is None or not self.account.ending.is_failure:
            memory, warnings = device_memory.of_this_process(), tuple(self._warnings)
            self._write(replace(account, memory=memory, warnings=warnings))

    def _write(self, account: RankAccount) -> None:
        self.account = account
        self._put(account)

    def _put(self, account: RankAccount) -> None:
        # A child that the test forked must not write to the rank's account.
        if self._file is None or os.getpid() != self._pid:
            return
        if not self._file.is_open():
            self._file.reopen()
            self.account = account = _closed_descriptors(account)
        self._file.write(account)


def _closed_descriptors(account: RankAccount) -> RankAccount:
    """The account of a rank whose test has closed the file of the account; what else went wrong may follow from it."""
    earlier = "\n".join(text for text in (account.summary, account.traceback) if text)
    return RankAccount(
        RankEnding.ERROR, account.started, account.ended, descriptors.CLOSED, earlier, FAILED, imported=account.imported
    )


def summarize(error: BaseException) -> str:
    """Type and first line of an exception, also of one whose str() fails."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as worse:
        return f"{name} (its str() raised {type(worse).__name__})"
    first = cut_middle(text.strip().partition("\n")[0], LONGEST_SUMMARY)
    return f"{name}: {first}" if first else name


def format_error(error: BaseException) -> str:
    """The traceback as text, without the frames of this module."""
    tb = error.__traceback__
    while tb is not None and "__rank_frame__" in tb.tb_frame.f_globals:
        tb = tb.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, tb))
    except Exception:
        # Formatting failed (a custom __str__, __repr__ or __cause__): the frames alone are still useful.
        return "".join(traceback.format_tb(tb)) + summarize(error) + "\n"


def run_and_exit(job: Job, rank: int, account: AccountFile, link: socket.socket, stream: int | None) -> NoReturn:
    """Run a rank and exit. `stream`: the descriptor for stdout and stderr; None keeps the current ones."""
    code = FAILED
    try:
        child.detach(stream)
        recording.begin()
        _listen(job, rank, link)
        code = _run(job, rank, AccountWriter(account))
    except BaseException:
        traceback.print_exc()
    finally:
        _save_coverage()
        child.exit_now(code)


def _save_coverage() -> None:
    """Save what coverage has measured in this rank, which ends without the exit handler that would do so."""
    coverage = sys.modules.get("coverage")
    measured = getattr(getattr(coverage, "Coverage", None), "current", lambda: None)()
    if measured is not None:
        with suppress(BaseException):  # whatever happens, a forked rank must not go on
            measured.stop()
            measured.save()


def main() -> NoReturn:
    """Run a rank that is a new interpreter: `python -c "... main()" FILE RANK ACCOUNT LINK PARENT`."""
    file, rank, account_fd, link_fd, parent = sys.argv[1], *map(int, sys.argv[2:6])
    child.start_session(parent, signal.SIGKILL)
    job: Job = pickle.loads(Path(file).read_bytes())
    job.context.apply()
    stream = None if job.debug_rank == rank else 1
    run_and_exit(job, rank, AccountFile(account_fd, job.account(rank)), socket.socket(fileno=link_fd), stream)


def _run(job: Job, rank: int, report: AccountWriter) -> int:
    """Run the body, leave the collectives and account for how it ended. Returns the exit status."""
    try:
        recording.sanitize(rank, job.sanitize, job.sanitizer_log(rank))
    except Exception as error:
        report.failed(error, assertion=False, within="the sanitizer could not begin: ")
        return FAILED
    code = _run_body(job, rank, report)
    try:
        recording.end_of_sanitizing()
    except Exception as error:
        report.failed(error, assertion=False)
    try:
        report.attach(recording.collectives())
    except Exception as error:
        report.failed(error, assertion=False, within="the collectives of this rank could not be read: ")
    return report.account.code if report.account is not None and not code else code


def _run_body(job: Job, rank: int, report: AccountWriter) -> int:
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
    """The exit status after sys.exit(). Without an account the rank exited before its test finished."""
    if report.account is not None:
        return report.account.code
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _listen(job: Job, rank: int, link: socket.socket) -> None:
    """Prepare to answer where this rank is: stacks on a signal, the flight recorder through a thread.

    The signal's chain ends in Python's own C-level handler, which writes its number to the wake-up descriptor: so the
    parent knows when the stacks are complete, even if this process holds the GIL in C forever.
    """
    link.setblocking(False)
    stacks = os.open(job.stacks(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    # A registration of the parent's would still count as such, although the next line replaces its handler.
    faulthandler.unregister(system.DUMP_STACKS)
    signal.signal(system.DUMP_STACKS, lambda *_: None)
    signal.set_wakeup_fd(link.fileno(), warn_on_full_buffer=False)
    faulthandler.enable(file=stacks)
    faulthandler.register(system.DUMP_STACKS, file=stacks, all_threads=True, chain=True)
    signals.unblock()
    # Not a threading.Thread: a test that counts or joins threads should not see it.
    _thread.start_new_thread(_answer, (job.recorder(rank), job.look(rank), link))


def _answer(target: Path, look: Path, link: socket.socket) -> None:
    # Poll here, so that this thread's stack has only this function. select() refuses descriptors above 1023.
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while True:
        poll.poll()
        try:
            asked = link.recv(64)
        except BlockingIOError:
            continue
        except OSError:
            return
        if not asked:
            return  # the process that started this rank is gone
        if ASK_COLLECTIVES in asked:
            with suppress(Exception):
                recording.answer(look, with_state=True)
        if ASK_RECORDER in asked:
            with suppress(Exception):
                recording.answer(target, with_state=False)
            with suppress(OSError):
                link.send(RECORDER_DONE)
