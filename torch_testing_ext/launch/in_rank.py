"""The process of a rank, from its first instruction to its exit."""

from __future__ import annotations

import _thread
import faulthandler
import functools
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._process import running_coverage, sessions, signals, system
from torch_testing_ext._process.stacks import write_on_request, write_stacks
from torch_testing_ext.launch.account_writer import AccountWriter
from torch_testing_ext.launch.accounts import ERROR_EXIT_CODE, AccountFile
from torch_testing_ext.launch.jobs import Job, log_of
from torch_testing_ext.launch.rank_collectives import (
    answer_error,
    begin_sanitizing,
    collectives_of_test,
    end_of_sanitizing,
    write_answer,
)
from torch_testing_ext.launch.rank_context import RankContext
from torch_testing_ext.launch.rank_stops import called, prepare
from torch_testing_ext.launch.terminal_turns import StopContext, open_fifo

__first_frames__ = ("_run", "_answer")


# The parent's requests to a rank, and the rank's answers: one byte each. A rank answers ASK_COLLECTIVES by writing
# its probe file.
ASK_RECORDER, RECORDER_DONE = b"R", b"r"
ASK_COLLECTIVES = b"C"
ASK_STACKS, STACKS_DONE = b"S", bytes([system.DUMP_STACKS_NOW])


def run_and_exit(
    job: Job,
    rank: int,
    file: AccountFile,
    link: socket.socket,
    stream: int | None,
    inherited: Any = None,
    siblings: tuple[int, ...] = (),
) -> NoReturn:
    """Run a rank and exit. `stream`: the descriptor for stdout and stderr; None keeps the current ones.

    `inherited` and `siblings` are for its context.
    """
    code = ERROR_EXIT_CODE
    account = AccountWriter(file)
    try:
        sessions.detach(stream)
        context = job.context_of(rank, account, inherited, siblings)
        context.enter()
        _listen(job, rank, link)
        code = _run(job, context)
    except BaseException as error:
        if account.account is not None:
            traceback.print_exc()
        else:
            _account_for(account, error)
    finally:
        _save_coverage()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # A queue sends what it was given.
            with suppress(BaseException):
                util._run_finalizers()
        sessions.exit_now(code)


def _account_for(account: AccountWriter, error: BaseException) -> None:
    """Account for an error before the test; print it if that is impossible, as on a full disk."""
    try:
        account.failed(error, assertion=False, within="before the test: ")
    except BaseException:
        traceback.print_exc()


def _save_coverage() -> None:
    """Save what coverage has measured in this rank, which ends without the exit handler that would do so."""
    coverage = running_coverage.current_coverage()
    if coverage is not None:
        with suppress(BaseException):  # whatever happens, a forked rank must not go on
            coverage.stop()
            coverage.save()


def main() -> NoReturn:
    """Run a rank that is a new interpreter: `python -c "... main()" FILE RANK ACCOUNT LINK PARENT`."""
    file = sys.argv[1]
    rank, account_fd, link_fd, parent = map(int, sys.argv[2:6])
    sessions.start_session(parent, signal.SIGKILL)
    job: Job = pickle.loads(Path(file).read_bytes())
    job.context.apply()
    stream = None if job.debug_rank == rank else 1
    account = AccountFile(account_fd, job.account(rank))
    link = socket.socket(fileno=link_fd)
    run_and_exit(job, rank, account, link, stream)


def _run(job: Job, context: RankContext) -> int:
    """Run the body, leave the collectives and account for how it ended. Returns the exit status."""
    account = context.account
    rank = context.rank
    with account.own_errors("before the test, in the sanitizer: "):
        begin_sanitizing(rank, job.sanitize, log_of(job.directory, rank, job.incarnation))
    if account.account is not None:
        return account.account.code
    code = _run_body(job, context)
    with account.own_errors():
        end_of_sanitizing()
    with account.own_errors("the collectives of this rank could not be read: "):
        account.attach(collectives_of_test())
    if code or account.account is None:
        return code
    return account.account.code


def _run_body(job: Job, context: RankContext) -> int:
    """Run the body, which accounts for its test. A sys.exit(), or an error outside the test, ends here."""
    account = context.account
    try:
        job.call(context)
    except SystemExit as leaving:
        return _exit_status(leaving, account)
    except BaseException as error:
        account.failed(error, assertion=isinstance(error, AssertionError))
        return ERROR_EXIT_CODE
    if account.account is None:
        account.passed()
    assert account.account is not None
    return account.account.code


def _exit_status(leaving: SystemExit, account: AccountWriter) -> int:
    """The exit status after sys.exit(). Without an account the rank exited before its test finished."""
    if account.account is not None:
        return account.account.code
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _listen(job: Job, rank: int, link: socket.socket) -> None:
    """Prepare to answer where this rank is, through a thread; where that does not run, stacks on a signal.

    The signal's chain ends in Python's own C-level handler, which writes its number to the wake-up descriptor: so the
    parent knows when the stacks are complete, even if this process holds the GIL in C forever.
    """
    link.setblocking(False)
    stops = StopContext(job.terminal, job.directory, rank, job.world_size)
    if job.debug_rank != rank:
        prepare(stops)
    # A registration of the parent's would still count as such, although the next line replaces its handler.
    faulthandler.unregister(system.DUMP_STACKS_NOW)
    signal.signal(system.DUMP_STACKS_NOW, lambda *_: None)
    signal.set_wakeup_fd(link.fileno(), warn_on_full_buffer=False)
    file = write_on_request(job.stacks(rank), chain=True)
    signals.unblock()
    # Where the watchdog of NCCL writes what it knows. A name that a test chooses counts before this one.
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(job.directory / "nccl_trace_rank_"))
    # gloo aborts a rank that gets more data than it expects. What it has issued is then told by nobody else.
    system.before_abort(functools.partial(_tell, job.recorder(rank), job.in_flight(rank)))
    # Not a threading.Thread: a test that counts or joins threads should not see it.
    call = open_fifo(job.directory, rank) if job.terminal.path else -1
    _thread.start_new_thread(_answer, (job.recorder(rank), job.in_flight(rank), file, link, stops, call))


def _answer(target: Path, in_flight: Path, file: int, link: socket.socket, stops: StopContext, call: int) -> None:
    """Answer the requests of the parent until it has gone, and the user's calls for this rank."""
    # Poll here, so that this thread's stack has only this function. select() refuses descriptors above 1023.
    poll = select.poll()
    poll.register(link, select.POLLIN)
    if call >= 0:
        poll.register(call, select.POLLIN)
    while True:
        if any(fd == call for fd, _ in poll.poll()):
            os.read(call, 64)
            _thread.start_new_thread(called, (stops,))
        try:
            asked = link.recv(64)
        except BlockingIOError:
            continue
        except OSError:
            return
        if not asked:
            # The process that started this rank is gone.
            return
        if ASK_STACKS in asked:
            write_stacks(file)
            with suppress(OSError):
                link.send(STACKS_DONE)
        if ASK_COLLECTIVES in asked:
            with suppress(Exception):
                write_answer(target, with_state=True)
        if ASK_RECORDER in asked:
            _tell(target, in_flight)
            with suppress(OSError):
                link.send(RECORDER_DONE)


def _tell(target: Path, in_flight: Path) -> None:
    """Write what this rank has issued so far, and the exception that is in flight."""
    with suppress(Exception):
        answer_error(in_flight)
    with suppress(Exception):
        write_answer(target, with_state=False)
