"""Looks at the collectives of ranks that have run for a while without news.

The ranks are asked to write them; nothing waits for the answers. A look may find that ranks disagree. Two looks may
show that ranks wait for each other, or for one that has ended, for ever. What cannot be proven waits for the time-out.

A look costs ranks and parent some milliseconds. While a rank computes, the others may well wait for it: then there are
few looks.
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
FACTOR_IF_BUSY = 3.0  # by which the time until a look is longer if a rank computes
DEFAULT_OF_GROUPS = 1800.0  # gloo's time-out: nobody who has not chosen another waits for it
# Ranks answer in milliseconds, unless they hold the GIL or the machine is loaded.
FIRST_READ, READ_PATIENCE = 0.03, 1.0


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
        self._pause = FIRST_READ
        self._idleness = Idleness()
        self._before: dict[int, RankRecord] = {}  # of the previous look
        self._is_certain = False  # a mismatch has been seen once
        self._candidates: frozenset[tuple[int, int]] = frozenset()
        self.due = 0.0  # when `step` is to be called next
        self._wait(FIRST_LOOK)

    def _wait(self, interval: float) -> None:
        """Look after this time if all ranks are idle then, or later."""
        self._interval = interval
        self._latest = now() + FACTOR_IF_BUSY * interval
        self._idleness.forget()
        self.due = now() + interval - self._between()

    def _between(self) -> float:
        """The time between two questions whether the ranks are idle."""
        return max(INTERVAL, self._interval / 4)

    def _look_after(self, seconds: float) -> None:
        self._latest = self.due = now() + seconds

    def on_news(self) -> None:
        """Something has happened in the run: wait a while before the next look."""
        if self._asked is None:
            self._wait(FIRST_LOOK)

    def hurry(self) -> None:
        """The logs of the ranks suggest that these wait for each other: look now."""
        if self._asked is None:
            self._interval = FIRST_LOOK
            self._look_after(0.0)

    def step(self, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]) -> Finding | None:
        """Ask, or read the answers. `ended`: for each rank that has ended, how, and what it has left."""
        if self._asked is None and not self._is_time(pending):
            self.due = min(now() + self._between(), self._latest)
            return None
        if self._asked is None:
            self._run.look()
            self._asked, self._pause = now(), FIRST_READ
            self.due = self._asked + self._pause
            return None
        records = {rank: record for rank in pending if (record := self._answer_of(rank)) is not None}
        if len(records) < len(pending) and now() < self._asked + READ_PATIENCE:
            self._pause *= 2
            self.due = now() + self._pause
            return None
        self._asked = None
        left = {rank: read_raw(rank, data) for rank, (_, data) in ended.items()}
        return self._judge(records, left, {rank: how for rank, (how, _) in ended.items()})

    def _is_time(self, pending: Sequence[int]) -> bool:
        """Is it time to look at the ranks?"""
        if now() >= self._latest:
            return True
        return bool(self._idleness.are_idle([self._run.pids[rank] for rank in pending]))

    def _answer_of(self, rank: int) -> RankRecord | None:
        assert self._asked is not None
        record = read_raw(rank, _data(self._run.job.look(rank)))
        return record if record is not None and record.at >= self._asked else None

    def _judge(
        self, running: dict[int, RankRecord], left: Mapping[int, RankRecord | None], ended: Mapping[int, str]
    ) -> Finding | None:
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
            self._look_after(CONFIRMATION)
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
            self._look_after(CONFIRMATION)
        else:
            self._wait(min(self._interval * GROWTH, LONGEST))
        return None

    def _from_logs(self, running: Mapping[int, RankRecord]) -> tuple[dict[int, RankRecord], dict[int, RankRecord]]:
        """What the logs say about the ranks that have answered, with the state of these, and of all others.

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
