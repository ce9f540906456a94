"""Errors of the functions of torch.distributed in this process."""

import itertools
import logging
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from torch_testing_ext._torch.torch_frames import places_outside_torch

# Taken before a test could replace it.
_now = time.time_ns


class ErrorOfCall(NamedTuple):
    """An error of a call of torch.distributed. `places`: the lines outside of torch that it came from, innermost first.

    `at`: in nanoseconds since 1970. `function`: "" if it has raised in a wait. `lost_peer`: another rank had ended.
    """

    at: int
    function: str
    lost_peer: bool
    places: tuple[tuple[str, int, str], ...]


_errors: list[ErrorOfCall] = []
_MOST_ERRORS = 1000
_MOST_PLACES = 8
_on_error: Callable[[], None] | None = None
_is_of_lost_peer: Callable[[BaseException], bool] | None = None


def on_error_of_collectives(call: Callable[[], None] | None) -> None:
    """Call this whenever a function of torch.distributed raises in this process."""
    global _on_error
    _on_error = call


def errors_of_collectives() -> list[ErrorOfCall]:
    """The errors of functions of torch.distributed that this process has seen."""
    return list(_errors)


def forget_errors() -> None:
    """The errors until now do not count for the next test."""
    _errors.clear()


def watch_errors(is_of_lost_peer: Callable[[BaseException], bool]) -> None:
    """Note errors from now on. `is_of_lost_peer`: does an error say that another rank has ended?"""
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
        note_error(sys._getframe(1), str(record.msg.get("func_name", "")))
        if _on_error is not None:
            _on_error()


def note_error(frame: FrameType | None, function: str = "") -> None:
    """A call of torch.distributed has raised the error that is being handled, with this stack."""
    if len(_errors) < _MOST_ERRORS:
        places = tuple(itertools.islice(places_outside_torch(frame), _MOST_PLACES))
        _errors.append(ErrorOfCall(_now(), function, has_lost_peer(sys.exc_info()[1]), places))


def has_lost_peer(error: BaseException | None) -> bool:
    return error is not None and _is_of_lost_peer is not None and _is_of_lost_peer(error)
