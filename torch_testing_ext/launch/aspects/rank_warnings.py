"""Warnings of ranks: recorded in the rank, and raised once more in the process of the test."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch_testing_ext.launch.account_writer import AccountWriter
from torch_testing_ext.launch.accounts import OwnWarning, RankAccount, pack_warning


def warn_again(accounts: Iterable[RankAccount | None], filtered: bool = False) -> None:
    """Raise each different warning in the accounts of some ranks once. `filtered`: see `raise_again`."""
    of_ranks: list[OwnWarning] = []
    for account in accounts:
        if account is not None:
            of_ranks += account.warnings
    raise_again(of_ranks, filtered)


def raise_again(packed: Iterable[OwnWarning], filtered: bool = False) -> None:
    """Raise each different warning once.

    The filters of the process that recorded it have let it pass. `filtered`: it may have others than this process has.
    """
    with warnings.catch_warnings():
        if not filtered:
            warnings.simplefilter("always")
        different = dict.fromkeys(OwnWarning(*warning) for warning in packed)
        for text, name, file, line in different:
            warnings.warn_explicit(_warning(name, text), None, file, line)


def _warning(name: str, text: str) -> Warning:
    module, _, cls = name.rpartition(".")
    category = getattr(sys.modules.get(module), cls, None)
    if isinstance(category, type) and issubclass(category, Warning):
        # The class may want other arguments.
        with suppress(Exception):
            warning = category(text)
            if str(warning) == text:
                return warning
    return UserWarning(f"{cls}: {text}")


# -- a rank


@contextmanager
def recorded_warnings(account: AccountWriter) -> Iterator[None]:
    """Add the warnings of this block to the account of a rank for pytest. Outside of it, they are in its output."""
    if "PYTEST_CURRENT_TEST" not in os.environ or "pytest" not in sys.modules:
        yield
        return
    with warnings.catch_warnings(record=True) as seen:
        try:
            with _uncaught_exceptions():
                yield
        finally:
            account.add(dict.fromkeys(map(pack_warning, seen)))


@contextmanager
def _uncaught_exceptions() -> Iterator[None]:
    """Make warnings of the exceptions that the hooks of the interpreter get, at the end of this block."""
    import pytest

    from torch_testing_ext._torch import imported_garbage

    pending: list[tuple[Warning, str, int]] = []

    def on_thread(args: Any) -> None:
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread else None
            add(pytest.PytestUnhandledThreadExceptionWarning, f"Exception in thread {name}", args)

    def on_unraisable(args: Any) -> None:
        what = args.err_msg or "Exception ignored in"
        add(pytest.PytestUnraisableExceptionWarning, f"{what}: {args.object!r}", args)

    def add(category: type[Warning], title: str, args: Any) -> None:
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        warning = category(f"{title}\n\n{''.join(lines)}")
        file, line = "", 0
        for frame in traceback.extract_tb(args.exc_traceback)[-1:]:
            file, line = frame.filename, frame.lineno or 0
        pending.append((warning, file, line))

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = on_thread, on_unraisable
    try:
        yield
        # Only what the test has made: a forked rank does not look at the rest.
        if imported_garbage.has_exempted_imported():
            gc.collect()
        while pending:
            warning, file, line = pending.pop(0)
            warnings.warn_explicit(warning, None, file, line)
    finally:
        threading.excepthook, sys.unraisablehook = before
