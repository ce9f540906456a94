"""An aspect: one thing that one may ask of a test in ranks, with all that the package knows of it.

The runner and pytest's plugin read what an aspect declares before anything else is imported. So its module imports
little; what only a test needs is imported in methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from torch_testing_ext._process.declarations import AskedOptions, Option, Setting, variables_of
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import Host, RankAttempt, RanksEnd, TestPlan
    from torch_testing_ext.launch.jobs import Job
    from torch_testing_ext.launch.rank_reports import RankReport
    from torch_testing_ext.launch.verdict import Verdict


class Aspect:
    """One thing that one may ask of a test in ranks. A module of `aspects/` has one."""

    # The name in documents.
    name: ClassVar[str]
    # Why hosts of these kinds cannot have it: a sentence about such ranks.
    gaps: ClassVar[Mapping[HostKind, str]] = MappingProxyType({})
    # The options of the runner and of pytest; some set a variable.
    options: ClassVar[tuple[Option[Any], ...]] = ()
    # The variables that no option sets.
    settings: ClassVar[tuple[Setting[Any], ...]] = ()
    # Whether it concerns every test, rather than those for which a variable of it is set.
    is_always_on: ClassVar[bool] = True
    # Whether it sees the end of each test whose ranks have claimed something.
    follows_claims: ClassVar[bool] = False

    def all_settings(self) -> tuple[Setting[Any], ...]:
        """Return all variables that tests and ranks read."""
        return (*self.settings, *(option.setting for option in self.options if option.setting is not None))

    # A run, of the runner or of pytest. `asked` has its options.

    def implied(self, asked: AskedOptions) -> Mapping[str, Any]:
        """Return the values of options of the runner, by name, that follow from those given. Raises ValueError."""
        return {}

    def require(self, asked: AskedOptions) -> None:
        """Raise ValueError if tests cannot run with these options here."""

    def begin(self, asked: AskedOptions, runs_tests: bool) -> None:
        """Prepare this process and those that it starts. Raises CannotBegin, and ValueError for a wrong option.

        `runs_tests`: tests run in this process, too, which may have imported torch.
        """

    def header(self, asked: AskedOptions) -> str:
        """Return a line about all tests of a run, for its beginning; "" for none."""
        return ""

    def facts(self, asked: AskedOptions) -> Mapping[str, str]:
        """Return properties of all tests of a run, by name, for reports in files."""
        return {}

    def takes_terminal(self, asked: AskedOptions) -> bool:
        """Whether tests have the user's terminal, so that the run draws nothing on it."""
        return False

    def variables(self, asked: AskedOptions, repetition: int = 0, command: str = "") -> Mapping[str, str]:
        """Return the variables of the processes of tests. `command`: runs a test again, whose name follows."""
        return dict(variables_of(self.options, asked))

    def repetitions(self, asked: AskedOptions) -> int | None:
        """Return how often each test runs, if this decides it."""
        return None

    def words_again(self, asked: AskedOptions, repetition: int) -> str:
        """Return the words by which a command repeats this repetition of a test; "" if they are those of the run."""
        return ""

    def longest(self, asked: AskedOptions) -> float | None:
        """Return the time in seconds after which a test in ranks is ended from outside, if this decides it."""
        return None

    def tests(self, asked: AskedOptions, tests: Sequence[Any]) -> Sequence[Any]:
        """Return the tests of the runner as they run with these options. Raises ValueError."""
        return tests

    def remarks(self, asked: AskedOptions, tests: Sequence[str]) -> Sequence[str]:
        """Return warnings about a run of tests with these names."""
        return ()

    # A test in ranks. A session calls these methods in their order.

    def host_of(self, host: Host) -> Host:
        """Return the host that runs a test in place of this one."""
        return host

    def check(self, host: Host, plan: TestPlan) -> TestPlan:
        """Return the plan of a test without what its host cannot have. Raises what keeps the test from running."""
        return plan

    def prepare(self, attempt: RankAttempt) -> None:
        """Decide what the ranks of an attempt do, before they start."""

    def equip(self, attempt: RankAttempt) -> None:
        """Get what processes need as long as they live, and give it back by the attempt's `resources`."""

    def complete_job(self, attempt: RankAttempt, job: Job) -> Job:
        """Return the job of the ranks, as processes, with what they have to know."""
        return job

    def runs(self, plan: TestPlan, run: Callable[[Any], tuple[Sequence[RankReport], Verdict]]) -> Verdict | None:
        """Run a test several times, and return one verdict on it; None: it runs once.

        `run` runs it with an object that `prepare` finds as `variation`, and returns how that has ended.
        """
        return None

    def finish(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        """See the end of the test in all ranks, and complete it."""
        return end


def in_force(aspects: Sequence[Aspect]) -> tuple[Aspect, ...]:
    """The aspects that concern the tests which run now."""
    return tuple(
        aspect
        for aspect in aspects
        if aspect.is_always_on or any(os.environ.get(setting.name) for setting in aspect.all_settings())
    )
