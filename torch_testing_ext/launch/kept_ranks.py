"""Ranks that several tests share: those of a class or module, started when a test needs them and replaced in doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_testing_ext.launch.aspects.leftovers import print_leftovers
from torch_testing_ext.launch.attempts import RankAttempt, TestPlan
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.jobs import Job, Sanitize
from torch_testing_ext.launch.verdict import Case, Expected
from torch_testing_ext.launch.watching.evidence import RankEvidence

from .aspect import in_force
from .aspects import ASPECTS
from .attempts import Host
from .host_kinds import HostKind
from .persistent_ranks import PersistentRanks


class _Kept(Host):
    """The common part of all tests of these ranks: it is no host of a test."""

    kind = HostKind.KEPT


# Seconds for idle ranks to tear their fixtures down and exit.
LEAVE_TIMEOUT = 10.0


class KeptRanks:
    """The ranks that the tests of one class or module share, each test a task of theirs."""

    def __init__(self, name: str):
        self._name = name
        self.ranks: PersistentRanks | None = None
        # What the ranks have as long as they live: files, addresses and devices.
        self._ground: RankAttempt | None = None

    @property
    def directory(self) -> Path:
        """The folder for the files of the ranks."""
        assert self._ground is not None
        return self._ground.directory

    @property
    def are_there(self) -> bool:
        """Whether all ranks are there, and may run another test."""
        return self.ranks is not None and not self.ranks.is_over and self.ranks.is_complete()

    @property
    def is_busy(self) -> bool:
        """Whether the ranks run a test for which nobody waits any more."""
        return self.ranks is not None and not self.ranks.is_over and self.ranks.is_busy

    @property
    def differ_in_hash(self) -> bool:
        """Whether each rank has a hash seed of its own."""
        return self.ranks is not None and self.ranks.run.job.differs_in_hash

    def start(self, plan: TestPlan, make_job: Callable[[RankAttempt], Job], inherited: Any = None) -> Run:
        """Start the ranks. `plan`: what all of their tests have in common."""
        ground = RankAttempt(_Kept(), replace(plan, folder=self._name), in_force(ASPECTS))
        try:
            ground.prepare()
            self.ranks = PersistentRanks(make_job(ground), inherited)
        except BaseException:
            ground.close()
            raise
        self._ground = ground
        return self.ranks.run

    def begin(self, task: str, sanitize: Sanitize) -> Path:
        """Have all ranks begin a test. Returns the path prefix of its files."""
        assert self.ranks is not None
        return self.ranks.start(task, sanitize)

    def watch(self, timeout: float | None, expected: Expected, endless: float | None = None) -> RankEvidence:
        """Wait until the test has ended in all ranks. If this is interrupted, they are ended."""
        assert self.ranks is not None
        try:
            return self.ranks.watch(timeout, expected, endless)
        except BaseException:
            # Ctrl-C, or the signal of pytest-timeout.
            self.ranks.end()
            raise

    def output(self, rank: int) -> str:
        """The text that a rank has printed since the latest test began."""
        assert self.ranks is not None
        return self.ranks.output(rank)

    def end(self) -> None:
        """End the ranks at once."""
        if self.ranks is not None:
            self.ranks.end()

    def dismiss(self) -> str:
        """Let the ranks exit, and give back what they had. Returns what went wrong in them after their tests."""
        ranks, self.ranks = self.ranks, None
        if ranks is None or self._ground is None:
            return ""
        try:
            if ranks.is_over:
                return ""
            end = ranks.dismiss(LEAVE_TIMEOUT)
            name = f"{self._name} (after {ranks.last.rpartition('::')[2]})" if ranks.last else self._name
            print_leftovers(name, end.reports)
            return end.verdict(Case(name)).message
        finally:
            self._ground.close()
