"""The kinds of faults of a rank."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass, replace
from typing import Any

from .points import Point, call, checked_rank

# Keeps these frames out of tracebacks: a wrong argument is shown at the line of the user.
__unittest = True
__tracebackhide__ = True

# The signal by which each of these faults ends its process.
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}


@dataclass(frozen=True)
class PlannedFault:
    """A fault of one rank at one point."""

    kind: str
    rank: int | None = None
    at: Point | None = None
    # How long it lasts; None: until it is healed, or for good.
    seconds: float | None = None
    code: int = 0
    # A pickled exception, and its type.
    error: bytes = b""
    error_type: str = ""
    # An exception that nobody catches is the end of the rank that the test expects.
    ends_rank: bool = False

    def __str__(self) -> str:
        own = {"exits": [str(self.code)], "raises": [self.error_type]}.get(self.kind, [])
        own += [f"{self.seconds:g}"] if self.seconds is not None else []
        own += [f"rank={self.rank}"] if self.rank is not None else []
        own += [f"at={self.at}"] if self.at is not None else []
        own += ["ends_rank=True"] if self.ends_rank else []
        return f"{self.kind}({', '.join(own)})" if own else self.kind

    @property
    def exit_code(self) -> int | None:
        """The exit code of the rank that dies by it, negative for a signal; None if it need not end the process."""
        if self.kind == "exits":
            return self.code
        return -_SIGNALS[self.kind] if self.kind in _SIGNALS else None

    @property
    def is_deadly(self) -> bool:
        return self.exit_code is not None

    @property
    def incarnation(self) -> int:
        """The process of the rank in which it happens: 0 is the first one."""
        return 0 if self.at is None else self.at.incarnation

    @property
    def did(self) -> str:
        """The verb for what has happened to the rank."""
        verbs = {"kill": "was killed", "segv": "was ended by SIGSEGV", "abort": "was ended by SIGABRT"}
        verbs |= {"exits": f"exited with code {self.code}", "raises": f"raised {self.error_type}"}
        verbs |= {"stop": "was stopped", "slow": "was delayed", "hold_gil": "held the GIL"}
        return verbs[self.kind]


@dataclass(frozen=True)
class PlannedRestart:
    """The rank is started again when it has died by a fault, so often."""

    rank: int
    times: int = 1


def kill(rank: int | None = None, at: Point | str | None = None) -> PlannedFault:
    """The rank is killed by SIGKILL."""
    return _fault(PlannedFault("kill", rank), at)


def segv(rank: int | None = None, at: Point | str | None = None) -> PlannedFault:
    """The rank dies by a segmentation fault."""
    return _fault(PlannedFault("segv", rank), at)


def abort(rank: int | None = None, at: Point | str | None = None) -> PlannedFault:
    """The rank aborts, as C++ code does after an uncaught error."""
    return _fault(PlannedFault("abort", rank), at)


def exits(code: int, rank: int | None = None, at: Point | str | None = None) -> PlannedFault:
    """The rank's process exits at once with this code."""
    if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 255:
        raise ValueError(f"exits({code!r}): an exit code is a number from 0 to 255")
    return _fault(PlannedFault("exits", rank, code=code), at)


def raises(
    error: BaseException | type[BaseException],
    rank: int | None = None,
    at: Point | str | None = None,
    ends_rank: bool = False,
) -> PlannedFault:
    """The call, step or mark raises this exception in the rank, which must catch it.

    `ends_rank`: the exception may end the rank.
    """
    try:
        made = error() if isinstance(error, type) else error
    except TypeError as why:
        raise TypeError(f"raises({error}): {why}; give an exception that is made") from None
    name = type(made).__name__
    if not isinstance(made, BaseException):
        raise ValueError(f"raises({error!r}): give an exception")
    try:
        packed = pickle.dumps(made)
        pickle.loads(packed)
    except Exception as why:
        raise ValueError(f"raises({name}): it cannot be pickled ({why}); define it at the level of a module") from None
    return _fault(PlannedFault("raises", rank, error=packed, error_type=name, ends_rank=bool(ends_rank)), at)


def stop(seconds: float | None = None, rank: int | None = None, at: Point | str | None = None) -> PlannedFault:
    """The rank is stopped by SIGSTOP: for some seconds, or until another rank calls `heal(rank)`."""
    return _fault(PlannedFault("stop", rank, seconds=seconds), at)


def slow(seconds: float, rank: int | None = None, at: Point | str | None = None) -> PlannedFault:
    """The rank sleeps."""
    return _fault(PlannedFault("slow", rank, seconds=_required("slow", seconds)), at)


def hold_gil(seconds: float, rank: int | None = None, at: Point | str | None = None) -> PlannedFault:
    """The rank's Python code stands still in all threads; its C++ code goes on."""
    return _fault(PlannedFault("hold_gil", rank, seconds=_required("hold_gil", seconds)), at)


def _required(kind: str, seconds: Any) -> float:
    if not is_number(seconds):
        raise ValueError(f"{kind}({seconds!r}): give the seconds that it lasts")
    return float(seconds)


def is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def restart(rank: int, times: int = 1) -> PlannedRestart:
    """Let a new process of the rank, once a fault has ended it, run the test from its beginning. See `incarnation`.

    `times`: the number of deaths in turn. Points say in which process they are: `mark("loading", incarnation=1)`.
    """
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise ValueError(f"restart({rank!r}, times={times!r}): give a number of 1 or more")
    return PlannedRestart(checked_rank(rank, f"restart({rank!r})"), times)


def _fault(fault: PlannedFault, at: Point | str | None) -> PlannedFault:
    """The fault at a point, or at the first call of an operation."""
    point = call(1, at) if isinstance(at, str) else at
    if fault.rank is not None:
        checked_rank(fault.rank, str(fault))
    if point is not None and not isinstance(point, Point):
        raise ValueError(f"{fault.kind}: at is {at!r}; give a point, such as at=call(3, 'all_reduce')")
    if fault.seconds is not None and not (is_number(fault.seconds) and fault.seconds > 0):
        raise ValueError(f"{fault.kind}({fault.seconds!r}): give a number of seconds greater than 0")
    return replace(fault, at=point)
