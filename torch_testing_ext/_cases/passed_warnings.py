"""Warnings that another process has recorded for a test: they are raised once more in the process of pytest.

A rank that is started for pytest records its own. As pytest does, it makes warnings of exceptions that have nobody to
catch them, in threads and in finalizers: with a filter `error`, they fail the rank.
"""

import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch_testing_ext.launch import AccountWriter, OwnWarning, RankAccount, RankReport


def pack(warning: warnings.WarningMessage) -> OwnWarning:
    """Turn a recorded warning into what a message can hold."""
    category = f"{warning.category.__module__}.{warning.category.__qualname__}"
    return OwnWarning(str(warning.message), category, warning.filename, warning.lineno)


def warn_again(ranks: Iterable[RankReport | RankAccount | None], filtered: bool = False) -> None:
    """Raise each different warning of some ranks once. `filtered`: see `raise_again`."""
    raise_again((each for one in ranks if one is not None for each in one.warnings), filtered)


def raise_again(packed: Iterable[OwnWarning], filtered: bool = False) -> None:
    """Raise each different warning once.

    The filters of the process that recorded it have let it pass. `filtered`: it may have others than this process has.
    """
    with warnings.catch_warnings():
        if not filtered:
            warnings.simplefilter("always")
        for text, name, file, line in dict.fromkeys(OwnWarning(*one) for one in packed):
            warnings.warn_explicit(_warning(name, text), None, file, line)


def _warning(name: str, text: str) -> Warning:
    module, _, cls = name.rpartition(".")
    category = getattr(sys.modules.get(module), cls, None)
    if isinstance(category, type) and issubclass(category, Warning):
        # Of a class that wants other arguments.
        with suppress(Exception):
            if str(found := category(text)) == text:
                return found
    return UserWarning(f"{cls}: {text}")


# -- a rank


@contextmanager
def recorded(account: AccountWriter) -> Iterator[None]:
    """Add the warnings of this block to the account of a rank for pytest. Outside of it, they are in its output."""
    if "PYTEST_CURRENT_TEST" not in os.environ or "pytest" not in sys.modules:
        yield
        return
    with warnings.catch_warnings(record=True) as seen:
        try:
            with _uncaught_exceptions():
                yield
        finally:
            account.add(dict.fromkeys(map(pack, seen)))


@contextmanager
def _uncaught_exceptions() -> Iterator[None]:
    """Make warnings of the exceptions that the hooks of the interpreter get, at the end of this block."""
    import pytest

    found: list[tuple[Warning, traceback.FrameSummary | None]] = []

    def on_thread(args: Any) -> None:
        if args.exc_type is not SystemExit:
            title = f"Exception in thread {args.thread.name if args.thread else None}"
            keep(pytest.PytestUnhandledThreadExceptionWarning, title, args)

    def on_unraisable(args: Any) -> None:
        keep(
            pytest.PytestUnraisableExceptionWarning, f"{args.err_msg or 'Exception ignored in'}: {args.object!r}", args
        )

    def keep(category: type[Warning], title: str, args: Any) -> None:
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        place = next(reversed(traceback.extract_tb(args.exc_traceback)), None)
        found.append((category(f"{title}\n\n{''.join(lines)}"), place))

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = on_thread, on_unraisable
    try:
        yield
        # Only what the test has made: a forked rank does not look at the rest.
        if gc.get_freeze_count():
            gc.collect()
        while found:
            warning, place = found.pop(0)
            warnings.warn_explicit(warning, None, place.filename if place else "", (place and place.lineno) or 0)
    finally:
        threading.excepthook, sys.unraisablehook = before
