"""The way of a test through its ranks, from the preparation to the verdict: the same for every host.

    verdict = session.run(host, plan)

A session makes a `RankAttempt` for each run of the test: one, or one for each fault of a sweep. What one may ask of a
test is an aspect, a module of `aspects/`: it prepares an attempt, equips its ranks, and sees its end. What differs
between fresh ranks, shared ranks, threads and others is the host (`attempts.py`).

A test class begins in its `setUp` and waits in its test method, so it calls `begin`, `finish` and `close` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_testing_ext.launch import launch_settings
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.launched_by import this_launch
from torch_testing_ext.launch.rank_reports import RankReport, any_claims
from torch_testing_ext.launch.verdict import Expected, Verdict

from .aspect import in_force
from .aspects import ASPECTS
from .attempts import Host, RankAttempt, RanksEnd, TestPlan


class Session:
    """A test in its ranks, from its beginning until all of its resources are given back."""

    def __init__(
        self,
        host: Host,
        plan: TestPlan,
        directory: Path | None = None,
        told: set[Any] | None = None,
        variation: Any = None,
    ):
        """`directory`: for the files of the first attempt, made by the caller; it is removed at the end.

        `told`, `variation`: as in `RankAttempt`, of a test that an aspect runs once more in other ranks.
        """
        launch_settings.check_settings()
        self._aspects = in_force(ASPECTS)
        self.host = self._host_here(host)
        self.plan = plan
        self._directory = directory
        self._attempt: RankAttempt | None = None
        self._variation = variation
        # The warnings that the runs of the test have had so far.
        self._told: set[Any] = set() if told is None else told

    def _host_here(self, host: Host) -> Host:
        """The host of the test in this process: an aspect may want another one, and a launcher has ranks of its own."""
        for aspect in self._aspects:
            host = aspect.host_of(host)
        if this_launch() is not None and host.kind is not HostKind.LAUNCHED:
            return host.in_place()
        return host

    @property
    def has_begun(self) -> bool:
        """Whether the ranks of an attempt have been started, and not been released."""
        return self._attempt is not None

    def begin(self) -> None:
        """Start the ranks of the first attempt. Raises what keeps the test from running, a skip for one."""
        for aspect in self._aspects:
            self.plan = aspect.check(self.host, self.plan)
        self._begin(self._directory, self._variation)

    def finish(self, expected: Expected | None = None, timeout: float | None = None) -> Verdict:
        """Wait for the ranks, run the other attempts of the test if it has several, and return the verdict on the test.

        `expected`, `timeout`: if they are known only now.
        """
        if expected is not None:
            self.plan = replace(self.plan, expected=expected, timeout=timeout)
            if self._attempt is not None:
                self._attempt.plan = self.plan
        for aspect in self._aspects:
            verdict = aspect.runs(self.plan, self._run)
            if verdict is not None:
                return verdict
        return self._end().verdict

    def close(self) -> None:
        """End what is left of the ranks, and give everything back."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            try:
                self.host.release(attempt)
            finally:
                attempt.close()

    def _begin(self, directory: Path | None = None, variation: Any = None) -> None:
        self.close()
        attempt = self._attempt = RankAttempt(
            self.host, self.plan, self._aspects, directory, variation, self._told, self._run_also
        )
        try:
            attempt.prepare()
            self.host.start(attempt)
        except BaseException:
            self.close()
            raise

    def _run(self, variation: Any) -> tuple[Sequence[RankReport], Verdict]:
        """Run the test once more, with what an aspect tries in it. The first run, with None, has begun."""
        if variation is not None:
            self._begin(variation=variation)
        end = self._end()
        return end.reports, end.verdict

    def _end(self) -> RanksEnd:
        """Wait for the ranks of the attempt, and complete what is known of their end."""
        assert self._attempt is not None
        end = self.host.judge(self._attempt)
        has_claims = any_claims(end.reports)
        for aspect in reversed(ASPECTS):
            if aspect in self._aspects or (aspect.follows_claims and has_claims):
                end = aspect.finish(self._attempt, end)
        return self.host.complete(self._attempt, end)

    def _run_also(self, host: Host, plan: TestPlan, variation: Any) -> None:
        """Run the test once more in other ranks, for an aspect that finds this `variation`."""
        _run(Session(host, plan, told=self._told, variation=variation))


def run(host: Host, plan: TestPlan) -> Verdict:
    """Run a test in ranks, and return the verdict on all of them."""
    return _run(Session(host, plan))


def _run(session: Session) -> Verdict:
    try:
        session.begin()
        return session.finish()
    finally:
        session.close()
