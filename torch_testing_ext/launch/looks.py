"""Looks at the collectives of ranks that have run for a while without news.

The ranks are asked to write them; nothing waits for the answers. A look may find that ranks disagree. Two looks may
show that ranks wait for each other, or for one that has ended, for ever. What cannot be proven waits for the time-out.

A look costs ranks and parent some milliseconds. While a rank computes, the others may well wait for it: then it is
seldom asked. Those that are idle meanwhile are asked as often as ever, since two of them may disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch_testing_ext._collectives.blocked import RankState, why_not_blocked
from torch_testing_ext._collectives.findings import Finding, Wait, describe_stuck, first_mismatch, stuck, waits
from torch_testing_ext._collectives.raw import read_raw
from torch_testing_ext._collectives.records import RankRecord

from .client import Run
from .idleness import INTERVAL, Idleness
from .report import now
from .sanitizer_logs import Logs

FIRST_LOOK = 1.0  # seconds without news
CONFIRMATION = 0.25
GROWTH, LONGEST = 1.6, 20.0
FACTOR_IF_BUSY = 3.0  # by which the time until all ranks are asked is longer if one computes
_FEWEST = 2  # ranks that may disagree
DEFAULT_OF_GROUPS = 1800.0  # gloo's time-out: nobody who has not chosen another waits for it
# Ranks answer in milliseconds, unless they hold the GIL or the machine is loaded. While their fork server imports for
# later ranks, none is asked yet: so the time-out of the last ones begins when one has answered.
FIRST_READ, LONGEST_PAUSE, READ_TIMEOUT = 0.03, 0.25, 1.0
ANSWER_TIMEOUT = 10.0


class Looks:
    """Looks at the ranks of a run again and again, at growing intervals.

    `endless`: a collective whose time-out is at least this many seconds does not end by itself before the test does.
    """

    def __init__(self, run: Run, endless: float, may_differ: bool, logs: Logs):
        self._run = run
        self._logs = logs
        self._endless = endless
        self._may_differ = may_differ
        self._asked: float | None = None
        self._answered: float | None = None  # when the first answer was seen
        self._ranks_asked: list[int] = []  # the ranks that were asked
        self._pause = FIRST_READ
        self._idleness = Idleness()
        self._before: dict[int, RankRecord] = {}  # of the previous look
        self._is_certain = False  # a mismatch has been seen once
        self._candidates: frozenset[tuple[int, int]] = frozenset()
        self.due = 0.0  # when `step` is to be called next
        self._begin()

    def _begin(self) -> None:
        self._interval = self._interval_of_all = FIRST_LOOK
        self._wait_for_all()
        self._wait()

    def _wait(self) -> None:
        """Look after the interval at those ranks that are idle then."""
        self._again: tuple[float, list[int]] | None = None  # when to look at ranks in any case
        self._idleness.forget()
        self.due = min(now() + self._interval - self._between(), self._latest)

    def _wait_for_all(self) -> None:
        """Look after the interval at all ranks if they are idle then, or later."""
        self._latest = now() + FACTOR_IF_BUSY * self._interval_of_all

    def _between(self) -> float:
        """The time between two questions whether the ranks are idle."""
        return max(INTERVAL, self._interval / 4)

    def _look_again(self, seconds: float, ranks: Sequence[int]) -> None:
        self.due = now() + seconds
        self._again = self.due, list(ranks)

    def on_news(self) -> None:
        """Something has happened in the run: wait a while before the next look."""
        if self._asked is None:
            self._begin()

    def hurry(self) -> None:
        """The logs of the ranks suggest that these wait for each other: look now."""
        if self._asked is None:
            self._interval = self._interval_of_all = FIRST_LOOK
            self._look_again(0.0, range(self._run.job.world_size))

    def step(self, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]) -> Finding | None:
        """Ask, or read the answers. `ended`: for each rank that has ended, how, and what it has left."""
        if self._asked is None:
            self._ranks_asked = self._ranks_to_ask(pending)
            if not self._ranks_asked:
                return None
            # Before the request: this process may be interrupted after it, until all have answered.
            self._asked, self._answered, self._pause = now(), None, FIRST_READ
            self._run.look(self._ranks_asked)
            self.due = self._asked + self._pause
            return None
        asked = [rank for rank in self._ranks_asked if rank in pending]
        records = {rank: record for rank in asked if (record := self._answer_of(rank)) is not None}
        if records and self._answered is None:
            self._answered = now()
        until = self._asked + ANSWER_TIMEOUT if self._answered is None else self._answered + READ_TIMEOUT
        if len(records) < len(asked) and now() < until:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self.due = now() + self._pause
            return None
        self._asked = None
        left = {rank: read_raw(rank, data) for rank, (_, data) in ended.items()}
        return self._judge(records, left, {rank: how for rank, (how, _) in ended.items()}, len(asked) == len(pending))

    def _ranks_to_ask(self, pending: Sequence[int]) -> list[int]:
        """The ranks to be asked now; if none, it is known when to try again."""
        if self._again is not None:
            at, ranks = self._again
            if now() < at:
                return []
            self._again = None
            if found := [rank for rank in pending if rank in ranks]:
                return found
        if now() >= self._latest:
            return list(pending)
        idle = self._idleness.idle([self._run.pids[rank] for rank in pending])
        found = [rank for rank in pending if idle is not None and self._run.pids[rank] in idle]
        if len(found) >= min(_FEWEST, len(pending)):
            return found
        self.due = min(now() + self._between(), self._latest)
        return []

    def _answer_of(self, rank: int) -> RankRecord | None:
        assert self._asked is not None
        record = read_raw(rank, _data(self._run.job.look(rank)))
        return record if record is not None and record.at >= self._asked else None

    def _judge(
        self,
        running: dict[int, RankRecord],
        left: Mapping[int, RankRecord | None],
        ended: Mapping[int, str],
        are_all: bool,
    ) -> Finding | None:
        """`running`: the answers of ranks that run. `are_all`: no other rank runs."""
        if self._logs:
            running, left = self._from_logs(running)
        known = [*running.values(), *(record for record in left.values() if record is not None)]
        waiting = {rank: calls for rank, calls in waits(known).items() if rank in running}
        # A test of a group's own time-out goes on by itself: its end shows what the mismatch means.
        timeouts = (wait.call.timeout for calls in waiting.values() for wait in calls)
        is_endless = all(timeout >= min(self._endless, DEFAULT_OF_GROUPS) for timeout in timeouts)
        if not self._may_differ and is_endless and (found := first_mismatch(known, unless_raised=True)) is not None:
            if self._is_certain or ended.keys() >= set(found.awaited):
                return found
            self._is_certain = True  # at the next look: the others may have come to the call, or answered, by then
            self._look_again(CONFIRMATION, self._ranks_asked)
            return None
        suspects = stuck({rank: calls for rank, calls in waiting.items() if self._never_end(calls)}, ended)
        blocked = {
            rank: waiting[rank]
            for rank in suspects
            if why_not_blocked(_state(self._before.get(rank)), running[rank].state) is None
        }
        candidates = frozenset((rank, call.call.order) for rank, calls in waiting.items() for call in calls)
        proven = stuck(blocked, ended) if candidates == self._candidates else {}
        if proven:
            return describe_stuck(proven, ended)
        self._before, changed, self._candidates = running, candidates != self._candidates, candidates
        if suspects and changed:
            self._look_again(CONFIRMATION, self._ranks_asked)
            return None
        if are_all:
            self._interval_of_all = min(self._interval_of_all * GROWTH, LONGEST)
            self._wait_for_all()
        self._interval = min(self._interval * GROWTH, LONGEST)
        self._wait()
        return None

    def _from_logs(self, running: Mapping[int, RankRecord]) -> tuple[dict[int, RankRecord], dict[int, RankRecord]]:
        """Findings of the logs about the ranks that have answered, with the state of these, and of all others.

        A log has sends and receives, too: that a rank has issued some does not speak against a proof.
        """
        records = self._logs.records()
        seen = {}
        for rank, answer in running.items():
            state = answer.state and replace(answer.state, p2p=False)
            if rank in records:
                seen[rank] = replace(records[rank], state=state, at=answer.at)
        return seen, {rank: record for rank, record in records.items() if rank not in running}

    def _never_end(self, calls: Sequence[Wait]) -> bool:
        return all(wait.call.timeout >= self._endless for wait in calls)


def _state(record: RankRecord | None) -> RankState | None:
    return record.state if record is not None else None


def _data(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
