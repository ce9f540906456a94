"""One attempt of a test in its ranks, and who takes part in it: the plan, the host, and the aspects.

A host is one way to have ranks: fresh ranks, ranks that tests share, threads and others. It says how the ranks begin,
what runs in them, and how a refusal is raised. An aspect is one thing that one may ask of a test in ranks
(`aspect.py`). `session.py` has the order in which all of them act.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch_testing_ext.launch import start
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.jobs import Job, ProcessContext, Sanitize
from torch_testing_ext.launch.named import Named
from torch_testing_ext.launch.rank_reports import RankReport
from torch_testing_ext.launch.verdict import Case, Expected, Verdict
from torch_testing_ext.launch.watching.evidence import RankEvidence
from torch_testing_ext.launch.watching.run_watcher import end_run, watch

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan, Sweep


@dataclass(frozen=True)
class DeviceNeed:
    """The accelerators of a test: a number that it leases, all that there are, or none."""

    # How many; 0 for none.
    count: int = 0
    # Whether its ranks see no accelerator.
    are_hidden: bool = False
    # The owner in words, for those who wait.
    owner: str = ""
    # A folder for locks, where that of this user cannot be used; None: one that ends with the lease.
    other_folder: Callable[[], Path] | None = None


@dataclass(frozen=True)
class TestPlan:
    """The wishes of a test for its ranks."""

    case: Case
    world_size: int
    # The time limit of the test in seconds; None: it has none.
    timeout: float | None = None
    expected: Expected = field(default_factory=Expected)
    # The kinds of checks that `@sanitize` names.
    kinds: Collection[str] = ()
    # Those of the test itself.
    faults: FaultPlan | Sweep | None = None
    # Whether the ranks run the test itself, rather than a function that it calls.
    is_whole_test: bool = False
    # Whether its class judges exit codes itself.
    judges_itself: bool = False
    devices: DeviceNeed = field(default_factory=DeviceNeed)
    # Whether the ranks get a MASTER_PORT that the test has set before.
    keeps_port: bool = False
    # How many machines the ranks are on, as far as they can tell.
    nodes: int = 1
    # The name of the folder for the files of the ranks; that of the case by default.
    folder: str = ""


@dataclass(frozen=True)
class RanksEnd:
    """The end of a test in its ranks: their reports, where there are any, and the verdict."""

    reports: Sequence[RankReport]
    verdict: Verdict

    def with_note(self, note: str) -> RanksEnd:
        """The end, with a note on something else."""
        return replace(self, verdict=self.verdict.with_note(note)) if note else self


class Host:
    """One way to have ranks. `session.run` calls the methods in their order below."""

    kind: ClassVar[HostKind]
    # Whether the ranks may have other filters of warnings than this process has.
    has_own_filters: ClassVar[bool] = False

    def in_world(self, size: int) -> Host:
        """The host that runs the test in a whole world of this size instead; itself if it never does."""
        return self

    def in_place(self) -> Host:
        """The host that runs the test in the processes of a launcher, of which this one is one; itself if none does."""
        return self

    def refusal(self, what: str, why: str) -> Exception:
        """The exception for a test that asks for what such ranks cannot have."""
        raise NotImplementedError

    def start(self, attempt: RankAttempt) -> None:
        """Start the ranks of an attempt."""
        raise NotImplementedError

    def watching(self) -> AbstractContextManager[None, bool | None]:
        """Surround the time in which this process waits for ranks."""
        return nullcontext()

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        """Wait until the test has ended in all ranks."""
        raise NotImplementedError

    def judge(self, attempt: RankAttempt) -> RanksEnd:
        """Wait for the ranks, and judge them. A host overrides this if its ranks are judged elsewhere."""
        with self.watching():
            evidence = self.watch(attempt)
        return RanksEnd(evidence.reports, evidence.verdict(attempt.plan.case))

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        """Add what only this host knows."""
        return end

    def release(self, attempt: RankAttempt) -> None:
        """End what is left of the ranks. It is called in any case, and may be called twice."""


class ProcessHost(Host):
    """A host whose ranks are processes that end with the test."""

    run: Run | None = None

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        assert self.run is not None
        return watch(self.run, attempt.timeout, attempt.expected, self.at_timeout)

    def at_timeout(self) -> None:
        """Called at the time-out, while ranks still run."""

    def release(self, attempt: RankAttempt) -> None:
        run, self.run = self.run, None
        if run is not None and run.alive:
            end_run(run)


class PreparesRanks(Protocol):
    """The part of an aspect that an attempt needs."""

    @property
    def gaps(self) -> Mapping[HostKind, str]: ...

    def prepare(self, attempt: RankAttempt) -> None: ...

    def equip(self, attempt: RankAttempt) -> None: ...

    def complete_job(self, attempt: RankAttempt, job: Job) -> Job: ...


class RankAttempt:
    """One run of a test in its ranks: its files, its variables, its checks, and what must be given back."""

    def __init__(
        self,
        host: Host,
        plan: TestPlan,
        aspects: Sequence[PreparesRanks],
        directory: Path | None = None,
        variation: Any = None,
        told: set[Any] | None = None,
        run_also: Callable[[Host, TestPlan, Any], None] | None = None,
    ):
        """`directory`: for its files, made by the caller; None makes one when needed. It is removed at the end.

        `variation`: what this run of a test tries that runs several times; None in the one that it begins with.
        `told`: what runs of the test before it have told the user. `run_also`: runs the test in other ranks, as another
        variation.
        """
        self.host = host
        self.plan = plan
        # Those that the host can have.
        self._aspects = [aspect for aspect in aspects if host.kind not in aspect.gaps]
        self._directory = directory
        self.variation = variation
        self.told: set[Any] = set() if told is None else told
        self.run_also = run_also
        # Variables that ranks get in addition to those of this process.
        self.environ: dict[str, str] = {}
        self.sanitize = Sanitize()
        # Whether the ranks have no time limit.
        self.is_endless = False
        # Whether the files of the ranks stay, if the user wants that.
        self.keeps_files = True
        self.resources = ExitStack()
        self._is_equipped = False

    @property
    def directory(self) -> Path:
        """The folder for the files of the ranks."""
        if self._directory is None:
            self._directory = start.new_directory(self.plan.folder or self.plan.case.name)
        return self._directory

    def close(self) -> None:
        """Give back what the ranks had, and remove their files."""
        try:
            self.resources.close()
        finally:
            if self._directory is not None:
                start.discard(self._directory, self.keeps_files)

    @property
    def timeout(self) -> float | None:
        """The time limit of the ranks."""
        return None if self.is_endless else self.plan.timeout

    @property
    def is_first(self) -> bool:
        """Whether this is the run that a test begins with."""
        return self.variation is None

    @property
    def expected(self) -> Expected:
        return self.plan.expected

    def prepare(self) -> None:
        """Decide what the ranks do, before they start."""
        for aspect in self._aspects:
            aspect.prepare(self)

    def equip(self) -> None:
        """Get what the processes of ranks need as long as they live, such as ports and devices."""
        if not self._is_equipped:
            self._is_equipped = True
            for aspect in self._aspects:
                aspect.equip(self)

    def job(self, body: Callable[..., object], subject: type | None = None, **fields: Any) -> Job:
        """Make the job of ranks that run `body` in the state of this process.

        `subject` is the class of the test, which the body gets; `fields` are further ones of the job.
        """
        from torch_testing_ext._machine import random_state

        self.equip()
        job = Job(
            Named.of(body),
            self.plan.world_size,
            self.directory,
            ProcessContext.here(self.environ),
            None if subject is None else Named.of(subject),
            seed=random_state.SEED,
            sanitize=self.sanitize,
        )
        for aspect in self._aspects:
            job = aspect.complete_job(self, job)
        return replace(job, **fields)
