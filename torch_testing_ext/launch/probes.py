"""Finds ranks that disagree or wait for each other while they run: by probes, and in the logs of sanitized ranks.

Ranks that have run for a while without news are asked for their collectives. They write these; nothing waits for
the answers. A probe costs ranks and parent some milliseconds. While a rank computes, the others may well wait for
it: then it is seldom asked. Those that are idle meanwhile are asked as often as ever, since two of them may
disagree.

The states are pure: each says when it is due, and the time is a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.proof.proof_of_hang import Evidence, ProofRules, judge_probe
from torch_testing_ext._collectives.records.issued_calls import RankRecord
from torch_testing_ext._collectives.records.raw_records import read_raw
from torch_testing_ext._process import system
from torch_testing_ext._process.logs import content_of
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.logs_of_ranks import LiveLogs, Logs

# Between two looks at the CPU time of ranks, which costs much less than to ask them: at least, and at most.
IDLE_INTERVAL = 0.15
LOOK = 1.0
# The system counts CPU time in steps of 0.01 s. Threads that serve connections use a little all the time.
_STEP, _SHARE = 0.015, 0.02
# Seconds without news.
FIRST_PROBE = 1.0
CONFIRMATION = 0.25
GROWTH, LONGEST = 1.6, 20.0
# The factor by which the time until all ranks are asked is longer if one computes.
FACTOR_IF_BUSY = 3.0
# Ranks that may disagree.
_FEWEST = 2
# Ranks answer in milliseconds, unless they hold the GIL or the machine is loaded. While their fork server imports for
# later ranks, none is asked yet: so the time for the last ones begins when one has answered.
FIRST_READ, LONGEST_PAUSE, ANSWER_TIMEOUT = 0.03, 0.25, 1.0
FIRST_ANSWER_TIMEOUT = 10.0


@dataclass(frozen=True)
class Pace:
    """The time until idle ranks are asked and until all are, in seconds, and when all are at the latest."""

    of_idle: float
    of_all: float
    latest: float

    @classmethod
    def first(cls, now: float) -> Pace:
        return cls(FIRST_PROBE, FIRST_PROBE, now + FACTOR_IF_BUSY * FIRST_PROBE)

    def again(self) -> Pace:
        return replace(self, of_idle=FIRST_PROBE, of_all=FIRST_PROBE)

    def slower(self, now: float, were_all_asked: bool) -> Pace:
        """The pace after a probe that has found nothing."""
        of_idle = min(self.of_idle * GROWTH, LONGEST)
        if not were_all_asked:
            return replace(self, of_idle=of_idle)
        of_all = min(self.of_all * GROWTH, LONGEST)
        return Pace(of_idle, of_all, now + FACTOR_IF_BUSY * of_all)

    @property
    def between(self) -> float:
        """The time between two looks at whether ranks are idle."""
        return max(IDLE_INTERVAL, self.of_idle / 4)


@dataclass(frozen=True)
class Waiting:
    """No rank is asked before `asked_at`; then those that are idle, or all at the latest moment of the pace.

    At `due`, it is looked whether they are idle.
    """

    pace: Pace
    due: float
    asked_at: float

    @classmethod
    def begin(cls, pace: Pace, now: float) -> Waiting:
        asked_at = min(now + pace.of_idle, pace.latest)
        return cls(pace, min(now + LOOK, now + pace.of_idle - pace.between, pace.latest), asked_at)

    def later(self, now: float) -> Waiting:
        """It is too early, or too few ranks are idle: look again."""
        left = self.asked_at - now
        pause = min(self.pace.between, LOOK)
        if left > 0:
            # Between the last two looks, it must show whether a rank is idle.
            pause = left if left <= LOOK else min(LOOK, left - IDLE_INTERVAL)
        return replace(self, due=min(now + pause, self.pace.latest))


@dataclass(frozen=True)
class Confirming:
    """The same ranks are asked once more at `due`, whatever they do."""

    pace: Pace
    due: float
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """The ranks have been asked, and their answers are read at `due`."""

    pace: Pace
    due: float
    ranks: tuple[int, ...]
    since: float
    pause: float = FIRST_READ
    first_answer: float | None = None

    @classmethod
    def begin(cls, pace: Pace, now: float, ranks: Sequence[int]) -> Asked:
        return cls(pace, now + FIRST_READ, tuple(ranks), now)

    def read(self, now: float, answered: int, pending: int) -> Asked | None:
        """The state if the ranks that have yet to answer get more time; None if the probe is over."""
        first_answer = self.first_answer
        if first_answer is None and answered:
            first_answer = now
        until = self.since + FIRST_ANSWER_TIMEOUT if first_answer is None else first_answer + ANSWER_TIMEOUT
        if answered == pending or now >= until:
            return None
        pause = min(2 * self.pause, LONGEST_PAUSE)
        return replace(self, due=now + pause, pause=pause, first_answer=first_answer)


class Idleness:
    """Tells whether processes are idle, from their CPU time at two moments. One that waits for a GPU may be."""

    def __init__(
        self,
        cpu_seconds: Callable[[int], float | None] = system.cpu_seconds,
        may_spin: Callable[[int], bool] = system.may_spin,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._may_spin = may_spin
        self._at = 0.0
        self._before: dict[int, float | None] | None = None

    def forget(self) -> None:
        self._before = None

    def idle(self, pids: Sequence[int], now: float) -> set[int] | None:
        """Return those of these processes that have not computed since the last call; None if that was too recent.

        Where the system shows no CPU time, they count as idle.
        """
        if self._before is not None and now < self._at + IDLE_INTERVAL:
            return None
        before = self._before
        elapsed = now - self._at
        self._at = now
        self._before = {pid: self._cpu_seconds(pid) for pid in pids}
        if before is None:
            return None
        most = _STEP + _SHARE * elapsed
        idle = set()
        for pid, seconds in self._before.items():
            has_computed = _has_used_more(most, before.get(pid), seconds)
            if not has_computed or self._may_spin(pid):
                idle.add(pid)
        return idle


def _has_used_more(most: float, before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return False
    return math.isinf(before) or math.isinf(after) or after - before > most


class Prober:
    """Probes the ranks of a run again and again, at growing intervals; reads logs often, which costs them nothing."""

    def __init__(
        self,
        run: Run,
        rules: ProofRules,
        logs: Logs | None,
        now: float,
        idleness: Idleness | None = None,
        is_checked: bool = False,
    ):
        """`is_checked`: torch compares the calls itself."""
        rules_of_logs = replace(rules, may_differ=rules.may_differ or is_checked)
        self._live = LiveLogs(logs, rules_of_logs, now) if logs else None
        self._run = run
        self._rules = rules
        self._logs = logs
        self._idleness = idleness or Idleness()
        # The ranks that have computed until the latest look.
        self._busy: set[int] = set()
        self._evidence = Evidence()
        # The reason why a deadlock is not proven; "" if none is suspected.
        self.doubt = ""
        self._state: Waiting | Confirming | Asked = Waiting.begin(Pace.first(now), now)

    @property
    def due(self) -> float:
        """The moment at which `step` is to be called next."""
        return self._state.due if self._live is None else min(self._state.due, self._live.due)

    def on_news(self, now: float) -> None:
        """Something has happened in the run: wait a while before the next probe."""
        if not isinstance(self._state, Asked):
            self._wait(Pace.first(now), now)

    def probe_now(self, now: float) -> None:
        """Probe all ranks at once: their logs suggest that they wait for each other."""
        if not isinstance(self._state, Asked):
            self._state = Confirming(self._state.pace.again(), now, tuple(range(self._run.job.world_size)))

    def step(self, now: float, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]) -> Finding | None:
        """Read the logs, ask, or read the answers. `ended`: for each rank that has ended, how, and what it has left."""
        if self._live is not None and self._live.due < self._state.due:
            finding = self._live.step(now, pending, _how_they_ended(ended))
            if self._live.has_new_suspects:
                self.probe_now(now)
            return finding
        if now < self._state.due:
            return None
        if isinstance(self._state, Asked):
            return self._read(self._state, now, pending, ended)
        ranks = self._ranks_to_ask(self._state, now, pending)
        if ranks:
            # Before the request: this process may be interrupted after it, until all have answered.
            self._state = Asked.begin(self._state.pace, now, ranks)
            self._run.probe(ranks)
        return None

    def _ranks_to_ask(self, state: Waiting | Confirming, now: float, pending: Sequence[int]) -> list[int]:
        """The ranks to be asked now; if none, it is known when to try again."""
        if isinstance(state, Confirming):
            still_pending = [rank for rank in pending if rank in state.ranks]
            if still_pending:
                return still_pending
            state = Waiting(state.pace, state.due, state.due)
        if now >= state.pace.latest:
            return list(pending)
        idle = self._idle(pending, now)
        if idle is None:
            self._state = state.later(now)
            return []
        if self._busy.intersection(idle):
            # What they wait for now is new: earlier probes do not tell how long that may take.
            state = Waiting(state.pace.again(), now, min(state.asked_at, now + FIRST_PROBE))
        self._busy = set(pending).difference(idle)
        if now >= state.asked_at and len(idle) >= min(_FEWEST, len(pending)):
            return idle
        self._state = state.later(now)
        return []

    def _idle(self, pending: Sequence[int], now: float) -> list[int] | None:
        """The ranks of these that are idle; None if that is not known yet."""
        pids = self._run.pids
        idle = self._idleness.idle([pids[rank] for rank in pending], now)
        return None if idle is None else [rank for rank in pending if pids[rank] in idle]

    def _read(
        self, state: Asked, now: float, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]
    ) -> Finding | None:
        """Read the answers, and conclude from them when all are there or no more is to be waited for."""
        asked = [rank for rank in state.ranks if rank in pending]
        running = self._answers_of(asked, state.since)
        longer = state.read(now, len(running), len(asked))
        if longer is not None:
            self._state = longer
            return None
        left: Mapping[int, RankRecord | None] = {rank: read_raw(rank, data) for rank, (_, data) in ended.items()}
        if self._logs:
            running, left = self._from_logs(self._logs, running, left)
        conclusion = judge_probe(self._evidence, running, left, _how_they_ended(ended), self._rules)
        self._evidence = conclusion.evidence
        self.doubt = conclusion.doubt
        if conclusion.is_suspicious:
            self._state = Confirming(state.pace, now + CONFIRMATION, state.ranks)
        else:
            self._wait(state.pace.slower(now, were_all_asked=len(asked) == len(pending)), now)
        return conclusion.finding

    def _wait(self, pace: Pace, now: float) -> None:
        self._state = Waiting.begin(pace, now)
        self._idleness.forget()

    def _answers_of(self, ranks: Sequence[int], since: float) -> dict[int, RankRecord]:
        """The answers that ranks have written since then."""
        answers = {}
        for rank in ranks:
            record = read_raw(rank, content_of(self._run.job.recorder(rank)))
            if record is not None and record.at >= since:
                answers[rank] = record
        return answers

    def _from_logs(
        self, logs: Logs, running: Mapping[int, RankRecord], left: Mapping[int, RankRecord | None]
    ) -> tuple[dict[int, RankRecord], dict[int, RankRecord]]:
        """The records of the logs: of the ranks that have answered, with their state, and of all others.

        A log has sends and receives, too: that a rank has issued some does not speak against a proof.
        """
        records = logs.records()
        completed = {}
        for rank, answer in running.items():
            # The numbers of messages are those of the answer.
            state = answer.state and replace(answer.state, p2p=False, message=None)
            if rank in records:
                completed[rank] = replace(
                    records[rank],
                    groups=records[rank].groups or answer.groups,
                    state=state,
                    at=answer.at,
                    creating=answer.creating,
                    lists=answer.lists,
                    living=answer.living,
                )
        others = {rank: record for rank, record in records.items() if rank not in running}
        # Only a rank itself knows the members that it has given for groups.
        for rank, known in left.items():
            if known is not None and rank in others:
                others[rank] = replace(others[rank], lists=known.lists)
        return completed, others


def _how_they_ended(ended: Mapping[int, tuple[str, bytes]]) -> dict[int, str]:
    return {rank: how for rank, (how, _) in ended.items()}
