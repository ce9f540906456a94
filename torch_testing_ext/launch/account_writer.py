"""The writer of an account: a rank records its failure at once, and its pass when everything is over."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import getpid
from pathlib import Path
from types import FrameType, TracebackType

from torch_testing_ext._collectives.records.growth_laws import GrowthClaim
from torch_testing_ext._process import system
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.files import DESCRIPTORS_CLOSED
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._tests import system_refusals
from torch_testing_ext._tests.launcher_variables import ADDRESS, is_loopback
from torch_testing_ext._tests.source_files import is_harness, is_library
from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.signs import error_texts
from torch_testing_ext.launch.accounts import (
    ERROR_EXIT_CODE,
    LONGEST_DETAILS,
    LONGEST_SUMMARY,
    AccountFile,
    OwnWarning,
    RaisedError,
    RankAccount,
    RankEnding,
    memory_of_this_process,
    now,
)
from torch_testing_ext.launch.causes import Cause, cause_in, cause_of, led_to
from torch_testing_ext.launch.exceptions_in_flight import raised_by_itself
from torch_testing_ext.launch.nested_errors import causes_of
from torch_testing_ext.launch.start_settings import SHOWLOCALS

_MOST_SITES = 30


_MOST_RELATED = 20  # lines on other exceptions
_LONGEST_LOCAL = 240
# Linux has it where the driver is loaded.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


# What the test of this process says of larger worlds: a part of its account.
growth_claims: list[GrowthClaim] = []


class AccountWriter:
    """Writes how the test of a rank ends: a failure at once, a pass only when everything is over."""

    def __init__(self, file: AccountFile | None):
        """Without a file the account is kept only in memory: a rank that is a thread needs no file."""
        self._file = file
        self._pid = getpid()
        self._warnings: tuple[OwnWarning, ...] = ()
        self._extras = ""
        self.started = now()
        self.account: RankAccount | None = None
        self.finished = False  # the test itself is over; only clean-up follows
        self.is_provisional = False  # the class overrides code that follows the test and may end the process
        self.sent_text: str | None = None  # the text of an exception that an overriding `run_test` has sent
        growth_claims.clear()

    @property
    def is_read(self) -> bool:
        """Whether the process that started this one reads the account."""
        return self._file is not None

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
        growth_claims.clear()
        if self.is_provisional and self.account is None and self._file is not None and getpid() == self._pid:
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

    def withdraw(self) -> RankAccount | None:
        """Take back what has been recorded of the test, and return it: it says something else than it seems."""
        account, self.account = self.account, None
        if account is not None and self._file is not None and getpid() == self._pid and self._file.is_open():
            self._file.clear()
        return account

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
        if not collectives or self.account is None or self._file is None or getpid() != self._pid:
            return
        if self._file.is_open():
            with suppress(OSError):
                self._file.attach(collectives)

    def _record(self, account: RankAccount) -> None:
        """Keep the first failure: a later one, in clean-up, follows from it or matters less."""
        if self.account is None or not self.account.ending.is_failure:
            account = replace(account, memory=memory_of_this_process(), growth=tuple(growth_claims))
            self._write(replace(account, warnings=self._warnings, extras=self._extras))

    def _write(self, account: RankAccount) -> None:
        self.account = account
        self._put(account)

    def _put(self, account: RankAccount) -> None:
        # A child that the test forked must not write to the rank's account.
        if self._file is None or getpid() != self._pid:
            return
        if not self._file.is_open():
            self._file.reopen()
            self.account = account = _closed_descriptors(account)
        self._file.write(account)


def account_of(
    error: BaseException, assertion: bool, started: float, within: str = "", traceback: str | None = None
) -> RankAccount:
    """The account of a test that has raised `error`. `within` begins the summary."""
    raised = format_error(error) if traceback is None else traceback
    return RankAccount(
        RankEnding.FAILED if assertion else RankEnding.ERROR,
        started,
        now(),
        within + summarize(error),
        "\n".join([raised.rstrip("\n"), *_replaced_around(error)]),
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
        text = str(error).strip() or type(error).__name__
        # The traceback has all of it.
        return cut_middle("\n".join(causes_of(error, text)) or text, LONGEST_DETAILS)
    except Exception:
        return ""


def related_to(error: BaseException) -> tuple[str, ...]:
    """A line for each exception of a group, and for each that the error was raised after."""
    _, *earlier = led_to(error)
    lines = [*map(_with_site, _members_of(error)), *(f"after {_with_site(exception)}" for exception in earlier)]
    return tuple([*_locals_around(error), *_replaced_around(error), *lines][:_MOST_RELATED])


def _locals_around(error: BaseException) -> Iterator[str]:
    """A line for each local variable of the function of the tests that has failed, if the user wants to see them."""
    if SHOWLOCALS.value():
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if not _is_ours(frame)]
        of_tests = [frame for frame in frames if not is_library(frame.f_code.co_filename)]
        for frame in (of_tests or frames)[-1:]:
            yield from (f"{name} = {text}" for name, text in _locals_of(frame).items() if name != "self")


def _locals_of(frame: FrameType) -> dict[str, str]:
    """The local variables of a function, without those that pytest has added to it."""
    return {name: _repr_of_local(value) for name, value in frame.f_locals.items() if not name.startswith("@")}


def _repr_of_local(value: object) -> str:
    try:
        return cut_middle(repr(value), _LONGEST_LOCAL)
    except Exception as error:
        return f"(its repr() raised {type(error).__name__})"


def _replaced_around(error: BaseException) -> Iterator[str]:
    """A line for each function of torch that the program has replaced, if torch itself has raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and torch_frames.is_of_torch(frames[-1].f_code.co_filename):
        from torch_testing_ext._torch import replacing

        for function in replacing.who_has_replaced_what():
            if function.is_by_program:
                yield f"with another {function.name} in this process, from {function.by[0]}"


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
        return system_refusals.LIMIT_OF_PROCESSES
    if message.endswith(f"Unable to find address for: {system.LOOPBACK}"):
        return system_refusals.NO_LOOPBACK
    if "Unable to find address for: " in message:
        known = ", ".join(name for _, name in socket.if_nameindex())
        return f"Unset GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')}: this machine has {known}"
    if message.startswith("Cannot re-initialize CUDA in forked") and not _NVIDIA_DRIVER.exists():
        return "This machine has no NVIDIA driver: torch would say so in a process that was not forked"
    if "unsupported gloo device" in message:
        return f"Unset GLOO_DEVICE_TRANSPORT={os.environ.get('GLOO_DEVICE_TRANSPORT', '')}"
    if "remote=[127." in message and not is_loopback(os.environ.get(ADDRESS, "")):
        return (
            "The name of another machine means 127.0.0.1 there: set GLOO_SOCKET_IFNAME to the interface by which it "
            "reaches this one"
        )
    return error_texts.advice_on(message)


def summarize(error: BaseException) -> str:
    """Type and first line of an exception, also of one whose str() fails."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as worse:
        return f"{name} (its str() raised {type(worse).__name__})"
    first = text.strip().partition("\n")[0]
    if causes := causes_of(error, text):
        first = "; ".join(causes)
    first = cut_middle(first, LONGEST_SUMMARY)
    if advice := _advice(first):
        first = f"{first.rstrip('.!')}. {advice}"
    if getattr(error, "names_its_type", False):
        return first
    return f"{name}: {first}" if first else name


def _frames_in_short(tb: TracebackType | None) -> str:
    try:
        return "".join(traceback.format_tb(tb))
    except Exception:
        # A test has replaced what reads the source.
        frames = (frame for frame, _ in traceback.walk_tb(tb))
        return "".join(f'  File "{frame.f_code.co_filename}", in {frame.f_code.co_name}\n' for frame in frames)


def format_error(error: BaseException) -> str:
    """The traceback as text, without the frames of the harness around the test and below its assertion."""
    tb = error.__traceback__
    while tb is not None and _is_ours(tb.tb_frame):
        tb = tb.tb_next
    try:
        shown = traceback.TracebackException(type(error), error, tb)
        if SHOWLOCALS.value():
            for summary, (frame, _) in zip(shown.stack, traceback.walk_tb(tb), strict=True):
                summary.locals = _locals_of(frame)
        ours = [_is_ours(frame) for frame, _ in traceback.walk_tb(tb)]
        while ours and ours.pop() and len(shown.stack) > 1 and isinstance(error, AssertionError):
            del shown.stack[-1]
        return "".join(shown.format())
    except Exception:
        # Formatting failed (a custom __str__, __repr__ or __cause__): the frames alone are still useful.
        return _frames_in_short(tb) + summarize(error) + "\n"
