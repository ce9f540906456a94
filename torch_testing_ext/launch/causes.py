"""The cause of a failure: the test itself, its peers or another process. The exception tells it, where it is caught."""

from __future__ import annotations

import enum
import errno
import sys
import traceback
from collections.abc import Iterator

from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.signs import error_texts


class Cause(enum.Enum):
    """The cause of an exception, as far as it decides which rank is the culprit, or whether the test runs again."""

    OWN = "own"
    LOST_PEER = "lost peer"  # another rank has ended
    TIMED_OUT = "timed out"  # other ranks have not come to a collective
    OF_ALL = "of all"  # one rank tells what failed in all of them
    PORT_IN_USE = "port in use"  # by another process, which may be another test

    @property
    def is_of_peers(self) -> bool:
        """Whether the exception follows from what other ranks do."""
        return self in (Cause.LOST_PEER, Cause.TIMED_OUT)


_OF_LOST_CONNECTIONS = (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE)


_CAUSE_BY_ERRNO = {**dict.fromkeys(_OF_LOST_CONNECTIONS, Cause.LOST_PEER), errno.EADDRINUSE: Cause.PORT_IN_USE}


def cause_of(error: BaseException) -> Cause:
    """Classify an exception. A port in use is also the cause of those that are raised for its error."""
    if any(_cause_of_one(cause) is Cause.PORT_IN_USE for cause in led_to(error)):
        return Cause.PORT_IN_USE
    return _cause_of_one(error)


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank has ended."""
    return cause_of(error) is Cause.LOST_PEER


def fails_rank(error: BaseException) -> bool:
    """Whether an exception that has ended a thread fails its rank: of collectives, or of a fault of the test."""
    return is_of_collectives(error) or getattr(error, "is_planned_fault", False)


def is_of_collectives(error: BaseException) -> bool:
    """Whether torch.distributed has raised an exception, or one that says what other ranks did."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return cause_of(error).is_of_peers or torch_frames.is_raised_by_distributed(frames)


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
            return cause_in(error_texts.lines_that_say_why(str(error).strip()))
        except Exception:  # its str() fails
            return Cause.OWN
    return Cause.OWN


def cause_in(summary: str) -> Cause:
    """Classify an exception of which only the text is known."""
    if "torch" not in sys.modules:
        return Cause.OWN
    known = {
        Cause.PORT_IN_USE: error_texts.PORT_IN_USE,
        Cause.LOST_PEER: error_texts.LOST_PEER,
        Cause.TIMED_OUT: error_texts.GAVE_UP,
    }
    return next((cause for cause, pattern in known.items() if pattern.search(summary)), Cause.OWN)
