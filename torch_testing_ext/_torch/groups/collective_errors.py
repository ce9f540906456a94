"""Errors of the functions of torch.distributed in this process."""

import logging
import time
from collections.abc import Callable

# Taken before a test could replace it.
_now = time.time_ns


# When they were raised, in nanoseconds since 1970.
_errors: list[int] = []
_MOST_ERRORS = 1000
_on_error: Callable[[], None] | None = None
_is_of_lost_peer: Callable[[BaseException], bool] | None = None


def on_error_of_collectives(call: Callable[[], None] | None) -> None:
    """Call this whenever a function of torch.distributed raises in this process."""
    global _on_error
    _on_error = call


def errors_of_collectives() -> list[int]:
    """The moments at which functions of torch.distributed have raised in this process."""
    return list(_errors)


def forget_errors() -> None:
    """The errors until now do not count for the next test."""
    _errors.clear()


def watch_errors(is_of_lost_peer: Callable[[BaseException], bool]) -> None:
    """Note errors from now on. `is_of_lost_peer`: whether an error says that another rank has ended."""
    global _is_of_lost_peer
    _is_of_lost_peer = is_of_lost_peer
    logger_of_errors().addHandler(_ErrorHandler())


def logger_of_errors() -> logging.Logger:
    """The logger by which torch logs each error of a collective, which it also raises: all versions."""
    from torch.distributed import c10d_logger

    return c10d_logger._c10d_logger


class _ErrorHandler(logging.Handler):
    """Notes when a collective has raised: torch logs that with the `error`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.msg, dict) or "error" not in record.msg:
            return
        note_error()
        if _on_error is not None:
            _on_error()


def note_error() -> None:
    """Note that a call of torch.distributed has raised."""
    if len(_errors) < _MOST_ERRORS:
        _errors.append(_now())


def has_lost_peer(error: BaseException) -> bool:
    return _is_of_lost_peer is not None and _is_of_lost_peer(error)
