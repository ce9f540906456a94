"""Errors of the functions of torch.distributed in this process."""

import logging
import time
from collections.abc import Callable

# Taken before a test could replace it.
_now = time.time_ns


_MOST_ERRORS = 1000


class CollectiveErrors:
    """Errors of functions of torch.distributed in this process. `on_error` is called for each."""

    def __init__(self) -> None:
        # The moments of errors, in nanoseconds since 1970.
        self.moments: list[int] = []
        self.on_error: Callable[[], None] | None = None
        self._is_of_lost_peer: Callable[[BaseException], bool] | None = None

    def watch(self, is_of_lost_peer: Callable[[BaseException], bool]) -> None:
        """Note errors from now on. `is_of_lost_peer`: whether an error says that another rank has ended."""
        self._is_of_lost_peer = is_of_lost_peer
        # A filter: tests look at the handlers of this logger, and replace them.
        logger_of_errors().addFilter(_heed)

    def note(self) -> None:
        """Note that a call of torch.distributed has raised."""
        if len(self.moments) < _MOST_ERRORS:
            self.moments.append(_now())

    def forget(self) -> None:
        """The errors until now do not count for the next test."""
        self.moments.clear()

    def has_lost_peer(self, error: BaseException) -> bool:
        return self._is_of_lost_peer is not None and self._is_of_lost_peer(error)


errors = CollectiveErrors()


def logger_of_errors() -> logging.Logger:
    """The logger by which torch logs each error of a collective, which it also raises: all versions."""
    from torch.distributed import c10d_logger

    return c10d_logger._c10d_logger


def _heed(record: logging.LogRecord) -> bool:
    """Note that a collective has raised: torch logs that with the `error`. Every record passes."""
    if isinstance(record.msg, dict) and "error" in record.msg:
        errors.note()
        if errors.on_error is not None:
            errors.on_error()
    return True
