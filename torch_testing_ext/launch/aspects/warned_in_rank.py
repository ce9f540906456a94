"""The warnings of a rank, in the rank."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_testing_ext.launch.account_writer import AccountWriter
from torch_testing_ext.launch.accounts import pack_warning


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
