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

from torch_testing_ext.faults import FaultPlan, Sweep
from torch_testing_ext.launch import launch_settings
from torch_testing_ext.launch.launch_settings import Settings
from torch_testing_ext.launch.launched_by import this_launch
from torch_testing_ext.launch.rank_reports import RankReport
from torch_testing_ext.launch.verdict import Expected, Verdict

from .aspects import ASPECTS
from .attempts import Host, HostKind, RankAttempt, RanksEnd, TestPlan
from .sweeps import sweep_verdict


class Session:
    """A test in its ranks, from its beginning until all of its resources are given back."""

    def __init__(self, host: Host, plan: TestPlan, directory: Path | None = None):
        """`directory`: for the files of the first attempt, made by the caller; it is removed at the end."""
        self.settings = launch_settings.read_settings()
        self.host = _host_here(host, self.settings)
        self.plan = plan
        self._directory = directory
        self._attempt: RankAttempt | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the ranks of an attempt have been started, and not been released."""
        return self._attempt is not None

    def begin(self) -> None:
        """Start the ranks of the first attempt. Raises what keeps the test from running, a skip for one."""
        for aspect in ASPECTS:
            self.plan = aspect.check(self.host, self.plan, self.settings)
        self._begin(self.plan.first_faults, self._directory)

    def finish(self, expected: Expected | None = None, timeout: float | None = None) -> Verdict:
        """Wait for the ranks, run the other attempts of a sweep, and return the verdict on the test.

        `expected`, `timeout`: if they are known only now.
        """
        if expected is not None:
            self.plan = replace(self.plan, expected=expected, timeout=timeout)
            if self._attempt is not None:
                self._attempt.plan = self.plan
        if isinstance(self.plan.faults, Sweep):
            return sweep_verdict(self.plan.faults, self._run)
        return self._end().verdict

    def close(self) -> None:
        """End what is left of the ranks, and give everything back."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            try:
                self.host.release(attempt)
            finally:
                attempt.close()

    def _begin(self, faults: FaultPlan | None, directory: Path | None = None, is_first: bool = True) -> None:
        self.close()
        attempt = self._attempt = RankAttempt(self.host, self.plan, self.settings, ASPECTS, faults, directory)
        attempt.is_first = is_first
        try:
            attempt.prepare()
            self.host.start(attempt)
        except BaseException:
            self.close()
            raise

    def _run(self, faults: FaultPlan) -> tuple[Sequence[RankReport], Verdict]:
        """Run the test with these faults of a sweep. The first run has begun."""
        if faults != self.plan.first_faults:
            self._begin(faults, is_first=False)
        end = self._end()
        return end.reports, end.verdict

    def _end(self) -> RanksEnd:
        """Wait for the ranks of the attempt, and complete what is known of their end."""
        assert self._attempt is not None
        end = self.host.judge(self._attempt)
        for aspect in reversed(ASPECTS):
            end = aspect.finish(self._attempt, end)
        return self.host.complete(self._attempt, end)


def run(host: Host, plan: TestPlan) -> Verdict:
    """Run a test in ranks, and return the verdict on all of them."""
    session = Session(host, plan)
    try:
        session.begin()
        return session.finish()
    finally:
        session.close()


def _host_here(host: Host, settings: Settings) -> Host:
    """The host of the test in this process: the settings may want a world, and a launcher has ranks of its own."""
    if settings.world is not None and host.kind is not HostKind.WORLD:
        return host.in_world(settings.world)
    if this_launch() is not None and host.kind is not HostKind.LAUNCHED:
        return host.in_place()
    return host
