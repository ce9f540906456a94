"""How a rank ended: what it wrote itself, and what its exit status adds to that."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace

from torch_testing_ext._process.exits import describe_exit

from .accounts import RankAccount, RankEnding


@dataclass(frozen=True)
class Exit:
    """What the process that waits for a rank saw: a wait status, when, and what the rank left running."""

    status: int
    at: float
    leftovers: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """As subprocess and multiprocessing give it: negative for a signal."""
        return os.waitstatus_to_exitcode(self.status)


@dataclass(frozen=True)
class RankReport:
    """Everything known of one rank at the end of a run."""

    rank: int
    ending: RankEnding
    seconds: float = 0.0  # from the start of the test to the end of this rank
    ended: float = 0.0  # on the clock that all ranks share: who was first?
    code: int | None = None  # exit code, negative for a signal; None where there is none
    summary: str = ""
    traceback: str = ""
    output: str = ""  # the last lines of what it printed
    stacks: str = ""  # taken while it was still running
    recorder: str = ""  # the flight recorder's JSON, taken while it was still running
    leftovers: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """This rank in one line, without its number."""
        after = f"after {self.seconds:.2f} s"
        match self.ending:
            case RankEnding.PASSED:
                return f"passed {after}"
            case RankEnding.SKIPPED:
                return f"skipped {after}: {self.summary}"
            case RankEnding.FAILED | RankEnding.ERROR:
                return f"{self.ending.value} {after}: {_shorten(self.summary)}"
            case RankEnding.EXITED:
                return f"{describe_exit(self.code, f' {after}')}, before the test finished{self._and_then()}"
            case RankEnding.KILLED:
                return describe_exit(self.code, f" {after}").removeprefix("was ") + self._and_then()
            case RankEnding.STOPPED:
                itself = f" (left with code {self.code} then)" if (self.code or 0) > 0 else ""
                return f"still running {after}, ended by the parent{itself}{self._and_then()}"
            case RankEnding.LOST:
                return f"lost {after}: {self.summary}"

    def _and_then(self) -> str:
        return f"; before that: {self.summary}" if self.summary else ""


# Where in a C++ source an error came up: longer than what it says.
_CPP_PLACE = re.compile(r"\[[^\]\s]+\.(cc|cpp|h|hpp):\d+\] ?")


def _shorten(summary: str, longest: int = 160) -> str:
    """A summary that fits into a line of a table; the whole of it stands in the traceback."""
    text = _CPP_PLACE.sub("", summary)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def assemble_report(
    rank: int, account: RankAccount | None, exit: Exit, began: float, stopped: float | None
) -> RankReport:
    """One report of one rank from its own account and its exit status. The exit status has the last word.

    `stopped`: when we began to end it, if we did. What it told after that is how it took being ended."""
    code = exit.code
    started = account.started if account else began
    ending = RankEnding.STOPPED if stopped is not None else RankEnding.KILLED if code < 0 else RankEnding.EXITED
    seen = RankReport(rank, ending, exit.at - started, exit.at, code, leftovers=exit.leftovers)
    if account is None:
        return seen  # also one that left by itself when we asked it to: it would not have come to an end
    in_time = stopped is None or account.ended <= stopped
    if in_time and (code == account.code or (stopped is not None and account.ending.is_failure)):
        return replace(
            seen,
            ending=account.ending,
            seconds=account.ended - started,
            ended=account.ended,
            summary=account.summary,
            traceback=account.traceback,
            imported=account.imported,
            notes=account.notes,
        )
    # It told one end and came to another: it crashed or hung on its way out. What it told is still worth reading.
    told = f"the test had {account.ending.value}" + (f": {account.summary}" if account.summary else "")
    return replace(seen, summary=told, traceback=account.traceback)


def now() -> float:
    """Seconds on the clock that all processes of a machine share."""
    return time.monotonic()
