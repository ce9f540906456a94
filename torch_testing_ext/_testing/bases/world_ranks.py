"""Ranks of a whole world: forks that do not communicate, a few at a time, and judged by what they have issued."""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._process import system
from torch_testing_ext._process.words import few
from torch_testing_ext._testing.bases.expected_imports import expected_imports
from torch_testing_ext._testing.bases.rank_accounts import recorded_account, refuse_what_ran_nothing
from torch_testing_ext._testing.bases.rank_life import run_rank
from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD
from torch_testing_ext.launch import RankEnding
from torch_testing_ext.launch.aspects import warnings_in_rank
from torch_testing_ext.launch.aspects.world import SIZE
from torch_testing_ext.launch.attempts import ProcessHost, RankAttempt, RanksEnd
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.rank_reports import all_passed
from torch_testing_ext.launch.user_warnings import show_to_user
from torch_testing_ext.launch.watching.evidence import RankEvidence

if TYPE_CHECKING:
    from torch_testing_ext._testing.bases.world_evidence import WorldFacts

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
__tracebackhide__ = True

# Whoever overrides one of these starts ranks, or judges them, in a way of its own.
_OF_OTHER_RANKS = ("_start_processes", "_join_processes", "_check_return_codes", "run_test_with_threaded_pg")


def not_run(size: int, why: str) -> unittest.SkipTest:
    """The skip of a test that cannot run in a whole world. `why`: a verb with its object."""
    from torch_testing_ext._collectives.worlds.world_views import not_in_world

    return unittest.SkipTest(not_in_world(size, why))


def require_ranks(test: unittest.TestCase | None, function: Any) -> None:
    """Skip a test that has no ranks. `test`: the case of unittest, if it is one."""
    size = SIZE.value()
    if size is not None and not isinstance(test, RankedTestCase) and not hasattr(function, WHOLE_WORLD):
        from torch_testing_ext._collectives.worlds.world_views import HAS_NO_RANKS

        raise not_run(size, HAS_NO_RANKS)


@dataclass(frozen=True)
class WorldBody:
    """The code that each rank of a world runs."""

    call: Callable[[launch.RankContext], object]
    # The object for the contexts of the ranks.
    inherited: Any = None
    # Whether it was written for ranks that communicate: then it need not suit a world, nor judge its values.
    is_test: bool = True


class WorldRanks(ProcessHost):
    """The ranks of a whole world. They are judged by what they have issued, when all have ended."""

    kind = HostKind.WORLD

    def __init__(self, body: WorldBody, why_not: str = "", buffered_sends: bool = False):
        """`why_not`: a verb with its object, why the test cannot run."""
        super().__init__()
        self.body = body
        self._why_not = why_not
        self._buffered_sends = buffered_sends
        # If all ranks have ended by themselves.
        self.facts: WorldFacts | None = None
        # What is to be said of a world that is sound.
        self.warnings: list[str] = []

    def refusal(self, what: str, why: str) -> Exception:
        size = SIZE.value()
        assert size is not None
        return not_run(size, why)

    def start(self, attempt: RankAttempt) -> None:
        if self._why_not:
            raise not_run(attempt.plan.world_size, self._why_not)
        self.start_world(attempt, attempt.job(run_rank_of_world))

    def start_world(self, attempt: RankAttempt, job: launch.Job) -> None:
        """Start the first rank of a job. The others follow when it has ended."""
        if dist.is_initialized():
            raise RuntimeError(
                "this process has a process group: check a whole world before it makes one, or destroy it"
            )
        for name in (*expected_imports(attempt.plan.case.file), *launch.preload_hints()):
            # Here, once: each world would do it again.
            importlib.import_module(name)
        own = replace(
            job, at_once=system.cores(), arguments={"timeout": attempt.timeout}, sanitize=Sanitize(is_recorded=True)
        )
        self.run = launch.launch_from_here(own, self.body)

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        # It imports the rules of collectives.
        from torch_testing_ext._testing.bases.world_evidence import RecordsOfWorld, WorldFacts

        assert self.run is not None
        records = RecordsOfWorld(self.run)
        evidence = launch.watch(self.run, attempt.timeout, attempt.expected, self.at_timeout, records)
        if not all_passed(evidence.reports):
            return evidence
        self.facts = WorldFacts(records.world, self._buffered_sends)
        self.facts.note_view(with_calls=self.run.job.keeps_lanes)
        return self.facts.complete(evidence)

    def judge(self, attempt: RankAttempt) -> RanksEnd:
        end = super().judge(attempt)
        skips = [report for report in end.reports if report.ending is RankEnding.SKIPPED]
        if skips and not any(report.ending.is_failure for report in end.reports):
            # A rank that skips as it does not suit a world speaks for all.
            first = skips[0]
            return replace(end, verdict=launch.Verdict(launch.TestOutcome.SKIPPED, first.summary, code=first.code))
        if self.facts is None or end.verdict.outcome is not launch.TestOutcome.PASSED:
            return end
        for line in self.facts.cuts:
            # What the ranks did until there has been compared.
            reason = f"not judged: compares communicated values at {line}"
            return replace(end, verdict=launch.Verdict(launch.TestOutcome.SKIPPED, reason))
        self.warnings = self.facts.warnings()
        for line in few(self.warnings):
            show_to_user(line)
        return end


def run_rank_of_world(context: launch.RankContext, timeout: float | None) -> None:
    """Run the body as a rank of a whole world. `timeout`: for waits in a store."""
    # It imports what ranks alone need.
    from torch_testing_ext._testing.bases.rank_in_world import RankInWorld

    world: WorldBody = context.inherited
    context.inherited = world.inherited
    ends_process = not world.is_test
    in_world = RankInWorld(context, timeout)

    def body() -> None:
        account = context.account
        try:
            with recorded_account(account, ends_process=ends_process), warnings_in_rank.recorded_warnings(account):  # noqa: SIM117
                with in_world.active(judges=not world.is_test):
                    refuse_what_ran_nothing(world.call(context))
        finally:
            in_world.finish()
        in_world.settle(account, world.is_test)

    run_rank(context, body, ends_process=ends_process, leaves_groups=False, reports_imports=True, meets_peers=False)


launch.Named.of(run_rank_of_world)


def why_not_in_world(test: RankedTestCase) -> str:
    """Why a test case cannot run in a whole world, as a verb with its object; "" if it can."""
    return f"starts or judges its ranks itself: {type(test).__qualname__}" if test._overrides(*_OF_OTHER_RANKS) else ""
