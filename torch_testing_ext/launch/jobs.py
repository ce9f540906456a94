"""Jobs: the description of a run, which the parent sends to the process that starts the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import AGAIN, SanitizeKind
from torch_testing_ext._process import messages
from torch_testing_ext._process.terminal import UserTerminal
from torch_testing_ext._process.user_commands import working_folder
from torch_testing_ext.launch.account_writer import AccountWriter
from torch_testing_ext.launch.named import Named
from torch_testing_ext.launch.pretended_nodes import Nodes
from torch_testing_ext.launch.rank_context import RankContext

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan


@dataclass(frozen=True)
class ProcessContext:
    """The parent's environment, working directory, sys.path and sys.argv at the time of the launch."""

    environ: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    argv: tuple[str, ...]

    @classmethod
    def here(cls, extra: Mapping[str, str] | None = None) -> ProcessContext:
        return cls({**os.environ, **(extra or {})}, working_folder(), tuple(sys.path), tuple(sys.argv))

    def apply(self) -> None:
        """Give this process the same."""
        if os.environ != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        # It may be closed to this user, or gone: a fork is where its parent was.
        if self.cwd and self.cwd != working_folder():
            os.chdir(self.cwd)
        for own, wanted in ((sys.path, self.path), (sys.argv, self.argv)):
            if tuple(own) != wanted:
                own[:] = wanted


@dataclass(frozen=True)
class Sanitize:
    """The work of the sanitizer in the ranks of a job; without kinds and seed, there is none."""

    kinds: frozenset[SanitizeKind] = frozenset()
    fails_for_order: bool = False
    # The seed of the delays.
    delays: int | None = None
    # The faults of the test as JSON, "" for none: their classes are imported only for a test that has some.
    encoded_faults: str = ""
    # The ranks have a recorder of their own, for which they inherit the hook on operations.
    is_recorded: bool = False

    def __bool__(self) -> bool:
        return bool(self.kinds) or self.delays is not None

    def with_faults(self, plan: FaultPlan | None) -> Sanitize:
        """Have these faults happen, too."""
        if plan is None:
            return self
        text = messages.to_json(plan)
        return replace(self, kinds=self.kinds | {SanitizeKind.CALLS}, encoded_faults=text)

    @cached_property
    def faults(self) -> FaultPlan | None:
        """The faults of the test, found by the numbers of the calls in the log."""
        if not self.encoded_faults:
            return None
        from torch_testing_ext.faults import FaultPlan

        plan: FaultPlan = messages.from_json(self.encoded_faults, messages.by_name(FaultPlan))
        return plan

    @property
    def note(self) -> str:
        """Say how to run a test again with the same delays; "" without delays."""
        if self.delays is None:
            return ""
        again = f"--delays={self.delays}, or TORCH_TESTING_EXT_DELAYS={self.delays}"
        return f"Collectives were delayed at random, with seed {self.delays}. To repeat the delays: {again}"


@dataclass(frozen=True)
class Job:
    """`body(context, **arguments)` in each of `world_size` ranks, or `body(context, subject, **arguments)`."""

    body: Named
    world_size: int
    # Logs, accounts and stacks of the ranks.
    directory: Path
    context: ProcessContext
    # The class of the test.
    subject: Named | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    fast_exit: bool = True
    # The ranks descend from the process that made this job.
    inherits: bool = True
    stream: bool = False
    # Ranks that pass tell when they ran, too.
    keeps_lanes: bool = False
    debug_rank: int | None = None
    # The terminal for a rank that stops.
    terminal: UserTerminal = field(default_factory=UserTerminal)
    expects_stops: bool = False
    # The reason of a rank that exits with such a code.
    skips: Mapping[int, str] = field(default_factory=dict)
    sanitize: Sanitize = field(default_factory=Sanitize)
    # Each rank has a hash seed of its own.
    differs_in_hash: bool = False
    # How often the rank was started before: see RankContext.
    incarnation: int = 0
    # Of ranks that do not wait for each other: how many run at the same time; None: all.
    at_once: int | None = None
    nodes: Nodes = field(default_factory=Nodes)

    @property
    def names(self) -> tuple[Named, ...]:
        """The things that the process which starts the ranks must know: the subject last, if there is one."""
        return (self.body,) if self.subject is None else (self.body, self.subject)

    @property
    def first_ranks(self) -> int:
        """The number of ranks that start with the run. Of ranks in turns, that is one: what it imports, all need."""
        return self.world_size if self.at_once is None else 1

    def context_of(
        self, rank: int, account: AccountWriter, inherited: Any = None, siblings: tuple[int, ...] = ()
    ) -> RankContext:
        return RankContext(
            rank,
            self.world_size,
            self.directory,
            account,
            self.seed,
            self.fast_exit,
            is_debugged=self.debug_rank is not None or self.expects_stops,
            inherited=inherited,
            incarnation=self.incarnation,
            can_restart=self.sanitize.faults is not None and bool(self.sanitize.faults.restarts),
            siblings=siblings,
            nodes=self.nodes,
        )

    def call(self, context: RankContext) -> None:
        """Run the body, in a rank."""
        things = [named.inherited() if self.inherits else named.resolve() for named in self.names]
        body, *subject = things
        body(context, *subject, **self.arguments)

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def account(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.account"

    def stacks(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.stacks"

    def recorder(self, rank: int) -> Path:
        """The collectives of the rank when it was asked for them last, by a probe or with its stacks."""
        return self.directory / f"rank{rank}.recorder"

    def in_flight(self, rank: int) -> Path:
        """The account of the exception that was in flight when the rank was asked for its stacks."""
        return self.directory / f"rank{rank}.in_flight"


def log_of(directory: str | Path, rank: int, incarnation: int = 0) -> Path:
    """The sanitizer's log of all that a rank issues, if it is sanitized."""
    return Path(directory, f"rank{rank}.sanitizer" + AGAIN * incarnation)
