"""Whether a rank failed by itself or because of its peers, told from the exception where it is caught."""

from __future__ import annotations

import enum
import errno
import sys


class Cause(enum.Enum):
    """The cause of an exception, as far as it decides which rank is the culprit."""

    OWN = "own"
    LOST_PEER = "lost peer"  # another rank has ended
    TIMED_OUT = "timed out"  # other ranks have not come to a collective


_OF_LOST_CONNECTIONS = (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE)


def cause_of(error: BaseException) -> Cause:
    """Classify an exception by its type and errno; where torch uses one type for everything, by its first line.

    An exception of this package says its cause itself, as `cause_of_failure`.
    """
    declared = getattr(error, "cause_of_failure", None)
    if isinstance(declared, Cause):
        return declared
    if isinstance(error, OSError) and error.errno is not None:
        return Cause.LOST_PEER if error.errno in _OF_LOST_CONNECTIONS else Cause.OWN
    if isinstance(error, (RuntimeError, OSError)):
        try:
            return cause_in(str(error).strip().partition("\n")[0])
        except Exception:  # its str() fails
            return Cause.OWN
    return Cause.OWN


def cause_in(summary: str) -> Cause:
    """Classify an exception of which only the text is known."""
    if "torch" not in sys.modules:
        return Cause.OWN
    from torch_testing_ext import _torch

    if _torch.errors.says_peer_is_lost(summary):
        return Cause.LOST_PEER
    return Cause.TIMED_OUT if _torch.errors.says_wait_timed_out(summary) else Cause.OWN
