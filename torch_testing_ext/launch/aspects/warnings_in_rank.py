"""Warnings in a rank, and exceptions that nobody catches: recorded for the process of the test."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from gc import collect
from typing import Any

from torch_testing_ext.launch.account_writer import AccountWriter, sites_of, summarize
from torch_testing_ext.launch.accounts import pack_warning
from torch_testing_ext.launch.causes import fails_rank, is_of_collectives

# The threads that have died in the test of this process, but for what others did: the name of each, and its exception
# in words, which keep no objects of the test.
dead_threads: list[tuple[str, str]] = []


@contextmanager
def recorded_warnings(account: AccountWriter) -> Iterator[None]:
    """Add the warnings of this block to the account of a rank for pytest. Outside of it, they are in its output.

    An exception that nobody catches in a thread is a warning, too, also without pytest. One of torch.distributed is
    raised again at the end: the rank did not take part in what its peers did.
    """
    if "PYTEST_CURRENT_TEST" in os.environ and "pytest" in sys.modules:
        with warnings.catch_warnings(record=True) as seen:
            try:
                with _uncaught_exceptions_for_pytest(), _uncaught_in_threads(_warning_of_pytest()):
                    yield
            finally:
                account.add(dict.fromkeys(map(pack_warning, seen)))
        return
    with _uncaught_in_threads(RuntimeWarning, account):
        yield


def _warning_of_pytest() -> type[Warning]:
    import pytest

    return pytest.PytestUnhandledThreadExceptionWarning


@contextmanager
def uncaught_in_threads() -> Iterator[Sequence[tuple[str, BaseException]]]:
    """Note the threads that die in this block: the name of each, and its exception."""
    dead: list[tuple[str, BaseException]] = []
    dead_threads.clear()

    def on_thread(args: Any) -> None:
        # Whoever asks for them may come late, or never: the main thread may wait for this one.
        threading.__excepthook__(args)
        error = args.exc_value
        if args.exc_type is SystemExit or error is None:
            return
        name = args.thread.name if args.thread else ""
        dead.append((name, error))
        if not fails_rank(error):
            place = next((f" ({site.place})" for site in reversed(sites_of(error))), "")
            dead_threads.append((name, f"{summarize(error)}{place}"))

    before = threading.excepthook
    threading.excepthook = on_thread
    try:
        yield dead
    finally:
        threading.excepthook = before


def raise_of_collectives(dead: Sequence[tuple[str, BaseException]]) -> None:
    """Raise the first exception that torch.distributed has raised: the rank did not take part in what its peers did."""
    for _, error in dead:
        if is_of_collectives(error):
            raise error


@contextmanager
def _uncaught_in_threads(category: type[Warning], account: AccountWriter | None = None) -> Iterator[None]:
    """Warn of the exceptions of threads at the end of this block, in this account if there is one."""
    with uncaught_in_threads() as dead:
        yield
    with warnings.catch_warnings(record=True) if account is not None else nullcontext() as seen:
        for name, error in dead:
            if fails_rank(error):
                raise error
            _warn_of(category, f"Exception in thread {name}: {summarize(error)}", error)
    if account is not None:
        account.add(map(pack_warning, seen or ()))


@contextmanager
def _uncaught_exceptions_for_pytest() -> Iterator[None]:
    """Make warnings of the exceptions that the interpreter cannot raise, at the end of this block."""
    import pytest

    from torch_testing_ext._torch import imported_garbage

    pending: list[tuple[str, BaseException]] = []

    def on_unraisable(args: Any) -> None:
        pending.append((f"{args.err_msg or 'Exception ignored in'}: {args.object!r}", args.exc_value))

    before = sys.unraisablehook
    sys.unraisablehook = on_unraisable
    try:
        yield
        # Only what the test has made: a forked rank does not look at the rest.
        if imported_garbage.has_exempted_imported():
            collect()
        while pending:
            _warn_of(pytest.PytestUnraisableExceptionWarning, *pending.pop(0))
    finally:
        sys.unraisablehook = before


def _warn_of(category: type[Warning], title: str, error: BaseException) -> None:
    """Warn of an exception, at the line that has raised it."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    file, line = "", 0
    for frame in traceback.extract_tb(error.__traceback__)[-1:]:
        file, line = frame.filename, frame.lineno or 0
    warnings.warn_explicit(category(f"{title}\n\n{''.join(lines)}"), None, file, line)
