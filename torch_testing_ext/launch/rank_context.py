"""The context of a rank: everything that its process has to know of the run, made by the launch layer for the body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path
from typing import Any

from torch_testing_ext.launch.account_writer import AccountWriter
from torch_testing_ext.launch.pretended_nodes import Nodes, Place


@dataclass
class RankContext:
    """One rank of a run. A persistent rank runs many bodies in one context."""

    rank: int
    world_size: int
    # The files of the run, the same for all ranks.
    directory: Path
    account: AccountWriter
    # The seed of torch, random and NumPy; None: as in this process.
    seed: int | None = None
    # gloo's groups end with the process.
    fast_exit: bool = True
    # The user debugs one of the ranks: no wait has a time-out.
    is_debugged: bool = False
    # The object that the launching process has handed to the ranks that it forks.
    inherited: Any = None
    # The groups that it creates: see _testing/bases/group_creation.py.
    group_creation: Any = None
    # How many processes of this rank have died by faults of the test before.
    incarnation: int = 0
    # A fault of the test starts a rank again.
    can_restart: bool = False
    # The processes of the other ranks that ran when this one started.
    siblings: tuple[int, ...] = ()
    nodes: Nodes = field(default_factory=Nodes)
    pid: int = field(default_factory=getpid)

    @property
    def place(self) -> Place:
        """The place of this rank among the nodes."""
        return self.nodes.place(self.rank, self.world_size)

    def enter(self) -> None:
        """Make this the context of the process, until it ends."""
        global _current
        _current = self

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the context of the process for a while: a launcher's process is a rank in each of its tests."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before


_current: RankContext | None = None


def local_rank_of(rank: int) -> int:
    """The number of a rank among those of its node."""
    return rank if _current is None else _current.nodes.place(rank, _current.world_size).local_rank


def current_context() -> RankContext | None:
    """Return the context of the rank that this process is, or that has forked it; None if there is none."""
    return _current


def context_here() -> RankContext | None:
    """Return the context of the rank that this process is; None also in a process that a rank's test has forked."""
    return _current if _current is not None and _current.pid == getpid() else None
