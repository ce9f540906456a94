"""The report that a rank writes about its own end: the cause, the file, its writer."""

from __future__ import annotations

import ast
import enum
import errno
import functools
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from torch_testing_ext._collectives.failure import Site
from torch_testing_ext._process import messages, system
from torch_testing_ext._process.files import DESCRIPTORS_CLOSED, file_behind
from torch_testing_ext._process.launcher_variables import ADDRESS, is_loopback
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.notes import Peaks
from torch_testing_ext._process.source_files import is_harness, source_tree
from torch_testing_ext._process.words import EndWords

# --------------------------------------------------------------------------------------------------------------------
# The cause of a failure: the test itself, its peers or another process. The exception tells it, where it is caught.


class Cause(enum.Enum):
    """The cause of an exception, as far as it decides which rank is the culprit, or whether the test runs again."""

    OWN = "own"
    LOST_PEER = "lost peer"  # another rank has ended
    TIMED_OUT = "timed out"  # other ranks have not come to a collective
    OF_ALL = "of all"  # one rank tells what failed in all of them
    PORT_IN_USE = "port in use"  # by another process, which may be another test

    @property
    def is_of_peers(self) -> bool:
        """Does the exception follow from what other ranks do?"""
        return self in (Cause.LOST_PEER, Cause.TIMED_OUT)


_OF_LOST_CONNECTIONS = (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE)
_CAUSE_BY_ERRNO = {**dict.fromkeys(_OF_LOST_CONNECTIONS, Cause.LOST_PEER), errno.EADDRINUSE: Cause.PORT_IN_USE}


def cause_of(error: BaseException) -> Cause:
    """Classify an exception. A port in use is also the cause of those that are raised for its error."""
    if any(_cause_of_one(cause) is Cause.PORT_IN_USE for cause in led_to(error)):
        return Cause.PORT_IN_USE
    return _cause_of_one(error)


def is_of_lost_peer(error: BaseException) -> bool:
    """Does an exception say that another rank has ended?"""
    return cause_of(error) is Cause.LOST_PEER


def led_to(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised for, as a traceback shows them."""
    current = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _cause_of_one(error: BaseException) -> Cause:
    """Classify an exception by its type and errno; where torch uses one type for everything, by its first line.

    An exception of this package says its cause itself, as `cause_of_failure`.
    """
    declared = getattr(error, "cause_of_failure", None)
    if isinstance(declared, Cause):
        return declared
    if isinstance(error, OSError) and error.errno is not None:
        return _CAUSE_BY_ERRNO.get(error.errno, Cause.OWN)
    if isinstance(error, (RuntimeError, OSError)):
        try:
            text = str(error).strip()
            first = text.partition("\n")[0]
            # Of a monitored barrier, the lines below say why a rank did not come.
            return cause_in(text if "monitoredBarrier" in first else first)
        except Exception:  # its str() fails
            return Cause.OWN
    return Cause.OWN


def cause_in(summary: str) -> Cause:
    """Classify an exception of which only the text is known."""
    if "torch" not in sys.modules:
        return Cause.OWN
    from torch_testing_ext._torch.groups import error_texts

    known = {
        Cause.PORT_IN_USE: error_texts.PORT_IN_USE,
        Cause.LOST_PEER: error_texts.LOST_PEER,
        Cause.TIMED_OUT: error_texts.GAVE_UP,
    }
    return next((cause for cause, pattern in known.items() if pattern.search(summary)), Cause.OWN)


# --------------------------------------------------------------------------------------------------------------------
# Accounts: each rank records how its test ended, in a file that outlives the rank.


def now() -> float:
    """Seconds on the clock that all processes of a machine share."""
    return time.monotonic()


# The exit status of a rank whose test raised; PyTorch's TEST_ERROR_EXIT_CODE.
ERROR_EXIT_CODE = 10
# Disk space reserved for each rank before it starts, so that a rank that fills the disk can still report it.
RESERVED = 16 * 1024
LONGEST_TEXT = 2_000_000
# With its texts cut to this length an account fits the reserved space, even if each character takes 12 bytes in JSON.
SHORTEST_TEXT = RESERVED // 16
_SEPARATOR = b"\0"
_PICKLE = b"\x80"  # begins every pickle
_END = _SEPARATOR + b"\n"  # and no collectives


class RankEnding(enum.Enum):
    """The end of a rank."""

    PASSED = EndWords.PASSED
    SKIPPED = EndWords.SKIPPED
    FAILED = EndWords.FAILED  # an assertion of the test
    ERROR = EndWords.ERROR  # any other exception
    EXITED = "exited"  # without a record of how the test ended
    KILLED = "killed"  # by a signal that we did not send
    STOPPED = "stopped"  # by us, while it was still running
    FAULT = "fault"  # by a fault of the test, as expected
    LOST = "lost"  # unknown: the process that watched it died

    @property
    def is_failure(self) -> bool:
        return self not in (RankEnding.PASSED, RankEnding.SKIPPED, RankEnding.FAULT)


class OwnWarning(NamedTuple):
    """A warning that a rank raised while its test ran, as `warnings.warn_explicit` takes it."""

    text: str
    category: str  # module and name of its class, with a dot between
    file: str
    line: int


@dataclass(frozen=True)
class RaisedError:
    """An exception as facts, besides the line and the traceback that show it. All are empty if there is none."""

    # The name of its type; empty also if only the texts are known.
    type_name: str = ""
    cause: Cause = Cause.OWN
    # The lines through which it came, outermost first.
    sites: tuple[Site, ...] = ()
    # All of its message.
    details: str = ""
    # A line for each exception that it contains, or was raised after.
    related: tuple[str, ...] = ()
    # Of a property that was tried when a peer was lost.
    example: str = ""

    @property
    def title(self) -> str:
        """The first line of its message."""
        return cut_middle(self.details.partition("\n")[0], LONGEST_SUMMARY)


NO_ERROR = RaisedError()


@dataclass(frozen=True)
class RankAccount:
    """A rank's own record of how its test ended, written to a file before the rank exits."""

    ending: RankEnding
    started: float  # time.monotonic(), one clock for all processes of a machine
    ended: float
    summary: str = ""  # one line
    traceback: str = ""
    code: int = 0  # the exit status that goes with it
    imported: tuple[str, ...] = ()  # modules of torch that the rank had to import itself
    notes: tuple[str, ...] = ()  # additional remarks
    memory: tuple[tuple[int, int, int], ...] = ()  # the most that it has had on each device: see verdict.py
    warnings: tuple[OwnWarning, ...] = ()
    extras: str = ""  # for the test framework of the parent, from its part in the rank
    collectives: bytes = b""  # what the rank has issued, as `_collectives.raw` packs it
    error: RaisedError = NO_ERROR  # by which it has failed


_KINDS = messages.by_name(RankAccount)


class AccountFile:
    """The writing side of an account: one file with space reserved in advance, rewritten with each new account."""

    def __init__(self, fd: int, path: Path):
        self.fd = fd
        self._path = path
        self._file = file_behind(fd)
        self._size = 0

    @classmethod
    def open(cls, path: Path) -> AccountFile:
        file = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), path)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fd, 0, RESERVED)
        except OSError:
            file.close()
            raise
        return file

    def is_open(self) -> bool:
        """False if the test has closed the descriptor; another file may have its number by now."""
        return file_behind(self.fd) == self._file

    def reopen(self) -> None:
        self.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, account: RankAccount) -> None:
        try:
            self._put(_encode(account, LONGEST_TEXT))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._put(_encode(account, SHORTEST_TEXT))

    def _put(self, data: bytes) -> None:
        # Invalidate the first byte until the end: if the rank is killed in between, the file does not parse. What was
        # written behind the end before stays there: to cut it off costs ranks that end together 2 ms, on ext4.
        os.pwrite(self.fd, b"\0", 0)
        self._write_all(data[1:] + _END, 1)
        os.pwrite(self.fd, data[:1], 0)
        self._size = len(data)

    def attach(self, data: bytes) -> None:
        """Write the rank's collectives behind its account, in which no NUL occurs. The next account drops them."""
        self._write_all(_SEPARATOR + data, self._size)

    def _write_all(self, data: bytes, at: int) -> None:
        while data:
            written = os.pwrite(self.fd, data, at)
            data, at = data[written:], at + written

    def clear(self) -> None:
        os.pwrite(self.fd, b"\0", 0)  # it does not parse

    def close(self) -> None:
        if self.is_open():
            os.close(self.fd)


def _encode(account: RankAccount, longest: int) -> bytes:
    summary, traceback = cut_middle(account.summary, longest // 4), cut_middle(account.traceback, longest)
    account = replace(account, summary=summary, traceback=traceback, collectives=b"")
    if longest < LONGEST_TEXT:
        error = RaisedError(account.error.type_name, account.error.cause)
        account = RankAccount(
            account.ending, account.started, account.ended, summary, traceback, account.code, error=error
        )
    return messages.to_json(account).encode("ascii")


def read_account(path: Path) -> RankAccount | None:
    """Return the account that a rank left, or None if there is none or it is incomplete."""
    try:
        text, separator, collectives = path.read_bytes().partition(_SEPARATOR)
        account: RankAccount = messages.from_json(text, _KINDS)
    except (OSError, ValueError):
        return None
    if collectives.startswith(_END[1:]):
        collectives = b""
    if separator and collectives and not collectives.startswith(_PICKLE):
        return None  # incomplete
    return replace(account, collectives=collectives)


def memory_of_this_process() -> Peaks:
    """Return the most that this process has had so far, if it has used CUDA."""
    with suppress(Exception):
        # A figure for a report: nothing depends on it.
        cuda_state = _state_of_cuda()
        if cuda_state is not None:
            return tuple((device, *peak) for device, peak in cuda_state.peak_memory().items())
    return ()


def forget_memory_of_this_process() -> None:
    """Let `of_this_process` start again: another test begins."""
    with suppress(Exception):
        cuda_state = _state_of_cuda()
        if cuda_state is not None:
            cuda_state.forget_peak_memory()


def _state_of_cuda() -> Any:
    """The module `cuda_state` of `_torch`, if this process has imported it and uses CUDA."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    return sys.modules.get("torch_testing_ext._torch.devices.cuda_state")


def pack_warning(warning: warnings.WarningMessage) -> OwnWarning:
    """Turn a recorded warning into what a message can hold."""
    category = f"{warning.category.__module__}.{warning.category.__qualname__}"
    return OwnWarning(str(warning.message), category, warning.filename, warning.lineno)


# --------------------------------------------------------------------------------------------------------------------
# Exceptions in flight: raised by the test, and not yet told, since a `finally` or an `__exit__` is still running.
#
# If that runs a collective which hangs or fails, the exception is nevertheless how the rank has failed. One that an
# `except` is handling is not: the test has expected it.


def raised_by_itself(error: BaseException) -> BaseException:
    """The exception by which a rank has failed: for one that says that a peer is lost, the one in flight before it."""
    if not cause_of(error).is_of_peers:
        return error
    return next(_in_flight(error.__context__, error.__traceback__), error)


def of_main_thread() -> BaseException | None:
    """The exception that is in flight in the main thread now, seen from another thread."""
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    active = handled[1] if isinstance(handled, tuple) else handled
    return next(_in_flight(active, None), None)


def _in_flight(newest: BaseException | None, until: TracebackType | None) -> Iterator[BaseException]:
    """Of an exception and those before it, the ones that no `except` handles, the newest first."""
    for error in led_to(newest):
        where = error.__traceback__
        if where is None or not isinstance(error, Exception) or cause_of(error).is_of_peers:
            continue
        frame = where.tb_frame
        line = _line_of(frame, until)
        if not _is_handled(frame.f_code.co_filename, where.tb_lineno, line):
            yield error


def _line_of(frame: FrameType, until: TracebackType | None) -> int:
    """The line that a frame has come to: in the traceback of a later exception, or now."""
    for other, line in traceback.walk_tb(until):
        if other is frame:
            return line
    return frame.f_lineno


def _is_handled(file: str, raised: int, line: int) -> bool:
    """Is an exception of the line `raised` handled at `line`: in an `except` that does not raise again?

    True also where the source is not known.
    """
    clauses = _clauses_of(file)
    if clauses is None:
        return True
    around = [clause for clause in clauses if raised in clause.guarded and line in clause.lines]
    if not around:
        return False
    innermost = min(around, key=lambda clause: len(clause.lines))
    return innermost.handles


class _Clause(NamedTuple):
    """An `except` or a `finally`, and the lines that it guards."""

    guarded: range
    lines: range
    handles: bool = False


@functools.cache
def _clauses_of(file: str) -> list[_Clause] | None:
    tree = source_tree(file)
    if tree is None:
        return None
    return [clause for node in ast.walk(tree) for clause in _clauses(node)]


def _clauses(node: Any) -> Iterator[_Clause]:
    """Yield the clauses of a `try`, which has them all."""
    if not hasattr(node, "finalbody"):
        return
    for handler in node.handlers:
        raises_again = isinstance(handler.body[-1], ast.Raise)
        yield _Clause(_lines(*node.body), _lines(handler), handles=not raises_again)
    if node.finalbody:
        guarded = _lines(*node.body, *node.handlers, *node.orelse)
        yield _Clause(guarded, _lines(*node.finalbody))


def _lines(*nodes: Any) -> range:
    return range(nodes[0].lineno, nodes[-1].end_lineno + 1)


# --------------------------------------------------------------------------------------------------------------------
# The writer of an account: a rank records its failure at once, and its pass when everything is over.

# Characters of a summary. The traceback has all of the exception.
LONGEST_SUMMARY = 2_000
LONGEST_DETAILS = 8_000
_MOST_SITES = 30
_MOST_RELATED = 20  # lines on other exceptions


class AccountWriter:
    """Writes how the test of a rank ends: a failure at once, a pass only when everything is over."""

    def __init__(self, file: AccountFile | None):
        """Without a file the account is kept only in memory: a rank that is a thread needs no file."""
        self._file = file
        self._pid = os.getpid()
        self._warnings: tuple[OwnWarning, ...] = ()
        self._extras = ""
        self.started = now()
        self.account: RankAccount | None = None
        self.finished = False  # the test itself is over; only clean-up follows
        self.is_provisional = False  # the class overrides code that follows the test and may end the process
        self.sent_text: str | None = None  # the text of an exception that an overriding `run_test` has sent

    def failed(self, error: BaseException, assertion: bool, within: str = "", traceback: str | None = None) -> None:
        """Record that the test raised `error`. `assertion`: is it a failed assertion? `within` begins the summary.

        `traceback`: the text that shows where it was raised, if a test framework has a better one.
        """
        text = format_error(error) if traceback is None else traceback
        own = raised_by_itself(error)
        self._record(
            account_of(
                own, isinstance(own, AssertionError) if own is not error else assertion, self.started, within, text
            )
        )

    def failed_with(self, summary: str, traceback: str) -> None:
        """Record an exception of which only the texts are known."""
        error = RaisedError(cause=cause_in(summary))
        self._record(
            RankAccount(RankEnding.ERROR, self.started, now(), summary, traceback, ERROR_EXIT_CODE, error=error)
        )

    def test_begins(self) -> None:
        """The test method is about to be called. It may run again: then the provisional pass does not count."""
        self.finished = False
        if self.is_provisional and self.account is None and self._file is not None and os.getpid() == self._pid:
            self._file.clear()

    def test_returned(self) -> None:
        """The test method itself has returned: if the code that follows it calls os._exit(0), the rank has passed."""
        self.finished = True
        if self.is_provisional and self.account is None:
            self._put(RankAccount(RankEnding.PASSED, self.started, now()))

    def skipped(self, reason: str, code: int) -> None:
        self._record(RankAccount(RankEnding.SKIPPED, self.started, now(), reason, code=code))

    def passed(self, imported: tuple[str, ...] = ()) -> None:
        self._record(RankAccount(RankEnding.PASSED, self.started, now(), imported=imported))

    def note(self, notes: Sequence[str]) -> None:
        """Add notes to the account that has been written."""
        assert self.account is not None
        self._write(replace(self.account, notes=(*self.account.notes, *notes)))

    def add(self, warnings: Iterable[OwnWarning], extras: str = "") -> None:
        """Add warnings to the account, whether it has been written or not, and set its extras."""
        self._warnings += tuple(warnings)
        self._extras = extras or self._extras
        if self.account is not None:
            self._write(replace(self.account, warnings=self._warnings, extras=self._extras))

    @contextmanager
    def own_errors(self, within: str = "") -> Iterator[None]:
        """Make an error of ours one of the test. `within` begins its summary."""
        try:
            yield
        except Exception as error:
            self.failed(error, assertion=False, within=within)

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
            memory = memory_of_this_process()
            self._write(replace(account, memory=memory, warnings=self._warnings, extras=self._extras))

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


def account_of(
    error: BaseException, assertion: bool, started: float, within: str = "", traceback: str | None = None
) -> RankAccount:
    """The account of a test that has raised `error`. `within` begins the summary."""
    return RankAccount(
        RankEnding.FAILED if assertion else RankEnding.ERROR,
        started,
        now(),
        within + summarize(error),
        format_error(error) if traceback is None else traceback,
        ERROR_EXIT_CODE,
        error=RaisedError(
            type(error).__name__,
            cause_of(error),
            sites_of(error),
            _text_of(error),
            related_to(error),
            example_of(error),
        ),
    )


def sites_of(error: BaseException) -> tuple[Site, ...]:
    """The lines through which an exception came, outermost first, without those of the harness."""
    frames = traceback.walk_tb(error.__traceback__)
    sites = [
        Site(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames if not _is_ours(frame)
    ]
    return tuple(sites[-_MOST_SITES:])


def _is_ours(frame: FrameType) -> bool:
    return "__unittest" in frame.f_globals or is_harness(frame.f_code.co_filename)


def _text_of(error: BaseException) -> str:
    """The message of an exception."""
    try:
        return cut_middle(str(error).strip() or type(error).__name__, LONGEST_DETAILS)
    except Exception:
        return ""


def related_to(error: BaseException) -> tuple[str, ...]:
    """A line for each exception of a group, and for each that the error was raised after."""
    _, *earlier = led_to(error)
    lines = [*map(_with_site, _members_of(error)), *(f"after {_with_site(exception)}" for exception in earlier)]
    return tuple(lines[:_MOST_RELATED])


def _members_of(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of an ExceptionGroup, and of the groups in it. Python has that class since 3.11."""
    members = getattr(error, "exceptions", ())
    for member in members if isinstance(members, tuple) else ():
        if isinstance(member, BaseException):
            inner = list(_members_of(member))
            yield from inner or [member]


def _with_site(error: BaseException) -> str:
    site = next(iter(sites_of(error)[-1:]), None)
    return summarize(error) + (f", at {site}" if site is not None else "")


def example_of(error: BaseException) -> str:
    """The example of a property in which a peer was lost: the exception of such a rank has it."""
    example = getattr(error, "example_of_failure", "")
    return cut_middle(example, LONGEST_DETAILS) if isinstance(example, str) else ""


def _closed_descriptors(account: RankAccount) -> RankAccount:
    """The account of a test that has closed this file's descriptor. Earlier errors become its traceback."""
    earlier = "\n".join(text for text in (account.summary, account.traceback) if text)
    return replace(
        account,
        ending=RankEnding.ERROR,
        summary=DESCRIPTORS_CLOSED,
        traceback=earlier,
        code=ERROR_EXIT_CODE,
        error=replace(account.error, cause=Cause.OWN),
    )


# What a thread that cannot be started raises: in Python, and in C++, as in gloo.
NO_THREAD = "can't start new thread"
_NO_THREAD_OF_CPP = "Resource temporarily unavailable"


def _advice(message: str) -> str:
    """Advise on errors that name neither the limit nor the variable that they come from."""
    if message in (NO_THREAD, _NO_THREAD_OF_CPP):
        return system.LIMIT_OF_PROCESSES
    if message.endswith(f"Unable to find address for: {system.LOOPBACK}"):
        return system.NO_LOOPBACK
    if "Unable to find address for: " in message:
        known = ", ".join(name for _, name in socket.if_nameindex())
        return f"Unset GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')}: this machine has {known}"
    if "unsupported gloo device" in message:
        return f"Unset GLOO_DEVICE_TRANSPORT={os.environ.get('GLOO_DEVICE_TRANSPORT', '')}"
    if "remote=[127." in message and not is_loopback(os.environ.get(ADDRESS, "")):
        return (
            "The name of another machine means 127.0.0.1 there: set GLOO_SOCKET_IFNAME to the interface by which it "
            "reaches this one"
        )
    return ""


def summarize(error: BaseException) -> str:
    """Type and first line of an exception, also of one whose str() fails."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as worse:
        return f"{name} (its str() raised {type(worse).__name__})"
    first = cut_middle(text.strip().partition("\n")[0], LONGEST_SUMMARY)
    if isinstance(error, RuntimeError) and (advice := _advice(first)):
        first = f"{first}. {advice}"
    return f"{name}: {first}" if first else name


def format_error(error: BaseException) -> str:
    """The traceback as text, without the frames of the harness around the test and below its assertion."""
    tb = error.__traceback__
    while tb is not None and _is_ours(tb.tb_frame):
        tb = tb.tb_next
    try:
        shown = traceback.TracebackException(type(error), error, tb)
        ours = [_is_ours(frame) for frame, _ in traceback.walk_tb(tb)]
        while ours and ours.pop() and len(shown.stack) > 1 and isinstance(error, AssertionError):
            del shown.stack[-1]
        return "".join(shown.format())
    except Exception:
        # Formatting failed (a custom __str__, __repr__ or __cause__): the frames alone are still useful.
        return "".join(traceback.format_tb(tb)) + summarize(error) + "\n"
