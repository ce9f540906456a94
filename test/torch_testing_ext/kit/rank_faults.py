"""The corpus of faults of ranks: what rank 1 of two does, and what every kind of rank must say of it.

A rank raises, fails, skips alone, exits, is killed or hangs; or both do the same. Each host of ranks runs all of them
(`launch/test_every_host.py`); what a host alone can do is in its own tests.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import unittest
from collections.abc import Callable
from dataclasses import dataclass

WORLD_SIZE = 2
PASSED, FAILED, ERROR, SKIPPED = "passed", "failed", "error", "skipped"


@dataclass(frozen=True)
class RankFault:
    """What each rank does, the outcome in unittest, and a pattern for what the message says of it."""

    body: Callable[[int], None]
    outcome: str
    pattern: str
    # The outcome in a run of run_test.py, which has words for the end of a process.
    in_runner: str

    @property
    def hangs(self) -> bool:
        return self.in_runner == "timeout"


FAULTS: dict[str, RankFault] = {}


Body = Callable[[int], None]

_threads_that_hang: list[threading.Thread] = []
_hangs_end = threading.Event()


def _hang() -> None:
    _threads_that_hang.append(threading.current_thread())
    _hangs_end.wait()


def end_hangs() -> None:
    """End the ranks that hang as threads of this process: it could not be forked as long as they are there."""
    _hangs_end.set()
    while _threads_that_hang:
        _threads_that_hang.pop().join()
    _hangs_end.clear()


def _fault(outcome: str, pattern: str, in_runner: str = "") -> Callable[[Body], Body]:
    """Add a function to the corpus under its name."""

    def add(body: Body) -> Body:
        FAULTS[body.__name__] = RankFault(body, outcome, pattern, in_runner or outcome)
        return body

    return add


@_fault(PASSED, "^$")
def passes(rank: int) -> None:
    pass


@_fault(ERROR, "ValueError: the reason")
def raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")


@_fault(ERROR, "ValueError: the reason")
def all_raise(rank: int) -> None:
    raise ValueError("the reason")


@_fault(FAILED, "AssertionError: the reason")
def fails(rank: int) -> None:
    if rank == 1:
        raise AssertionError("the reason")


@_fault(SKIPPED, "not today")
def all_skip(rank: int) -> None:
    raise unittest.SkipTest("not today")


@_fault(FAILED, "rank 1 skipped")
def skips_alone(rank: int) -> None:
    if rank == 1:
        raise unittest.SkipTest("not here")


@_fault(ERROR, "rank 1 of 2 exited with code 0", in_runner="crashed")
def exits_with_0(rank: int) -> None:
    if rank == 1:
        os._exit(0)


@_fault(ERROR, "rank 1 of 2 exited with code 3", in_runner="crashed")
def exits_with_3(rank: int) -> None:
    if rank == 1:
        os._exit(3)


@_fault(ERROR, "rank 1 of 2 exited with code 0|SystemExit: 0", in_runner="crashed")
def sys_exits_with_0(rank: int) -> None:
    if rank == 1:
        sys.exit(0)


@_fault(ERROR, "rank 1 of 2 was killed by SIGKILL", in_runner="crashed")
def is_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@_fault(ERROR, "rank 1 of 2 was killed by SIGSEGV", in_runner="crashed")
def crashes(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


@_fault(ERROR, "timed out after .*rank 1 of 2 still running|rank 1 .*timed out after", in_runner="timeout")
def hangs(rank: int) -> None:
    if rank == 1:
        _hang()


@_fault(ERROR, "timed out after .*all 2 ranks still running", in_runner="timeout")
def all_hang(rank: int) -> None:
    _hang()
