"""One run of a job as the parent sees it: which of its ranks are alive, and requests to those that started them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch_testing_ext._process.loop import EventLoop

from .blocks import Block
from .job import Job
from .other_nodes import OtherNodes
from .protocol import CloseStore, Dump, Look, SignalGroups, SignalRank, ToServer
from .report import Exit, now

# A server answers in milliseconds unless it is importing a module. A server that is stuck must not block this process.
ANSWER_PATIENCE = 30.0
# More than any pid: a signal to the pid of a rank on another node must not reach a process of this one.
_PIDS_OF_NODE = 1 << 22
_MOST_LISTED = 4  # ranks of a node


class RankServer(Protocol):
    """The fork server of a run, on this machine."""

    loop: EventLoop
    runs: dict[int, Run]

    def send(self, message: ToServer) -> None: ...
    def step(self, until: float | None) -> bool: ...
    def give_up(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Run:
    """One job while it runs, with everything that has been reported about it so far."""

    number: int
    job: Job
    server: RankServer
    began: float = field(default_factory=now)
    pids: tuple[int, ...] = ()
    exits: dict[int, Exit] = field(default_factory=dict)
    dumped: bool = False
    lost: str | None = None  # why the server is gone; None while it is there
    # If there are ranks on other nodes:
    blocks: tuple[Block, ...] = ()  # that of this node first
    nodes: OtherNodes | None = None
    port: int | None = None  # of the store for all ranks; 0 if it could not be made
    pids_elsewhere: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by group
    lost_groups: dict[int, str] = field(default_factory=dict)  # why the ranks of another node are gone
    undumped: set[int] = field(default_factory=set)  # groups that have yet to write their stacks

    @property
    def alive(self) -> list[int]:
        """The ranks that are still running."""
        return [rank for rank in range(len(self.pids)) if rank not in self.exits and self.why_lost(rank) is None]

    def why_lost(self, rank: int) -> str | None:
        """Why nothing more can be known about a rank; None as long as something may."""
        if self.lost or not self.lost_groups:
            return self.lost
        return next((why for group, why in self.lost_groups.items() if rank in self.blocks[group].ranks), None)

    @property
    def others(self) -> list[int]:
        """The groups of ranks on other nodes, as far as these are there."""
        return [block.group for block in self.blocks[1:] if block.group not in self.lost_groups]

    def places(self) -> str:
        """Which ranks are on which node, in words; empty if all are on this machine."""
        parts = [f"{_words_of(block.ranks)} on node {block.node}" for block in self.blocks]
        return ", ".join(parts)

    def has_started(self) -> bool:
        """Have all ranks started, here and elsewhere?"""
        return bool(self.pids) and self.pids_elsewhere.keys() == {block.group for block in self.blocks[1:]}

    def take_pids_elsewhere(self) -> None:
        """Give the ranks of other nodes pids that no process of this node can have."""
        for group, pids in sorted(self.pids_elsewhere.items()):
            self.pids += tuple(group * _PIDS_OF_NODE + pid for pid in pids)

    @property
    def local_pids(self) -> dict[int, int]:
        """The pids of the ranks on this machine."""
        return {rank: self.pids[rank] for rank in self.job.ranks if rank < len(self.pids)}

    def wait_for_event(self, until: float | None = None) -> bool:
        """Wait for the next event and handle it. Returns False if the time `until` came first."""
        return self.server.step(until)

    def _tell(self, message: ToServer) -> None:
        self.server.send(message)
        self._tell_others(message)

    def _tell_others(self, message: ToServer) -> None:
        for group in self.others:
            assert self.nodes is not None
            self.nodes.send(group, message)

    def end(self, number: int) -> None:
        """Signal all ranks that are still running, with all processes in their groups."""
        self._tell(SignalGroups(self.number, number))

    def end_others(self, number: int) -> None:
        """Signal the ranks of other nodes: those of this one are gone."""
        self._tell_others(SignalGroups(self.number, number))

    def close_store(self) -> None:
        """Tell all nodes that the run is over."""
        self._tell(CloseStore(self.number))

    def signal(self, number: int, rank: int) -> None:
        """Signal one rank and no other process."""
        self._tell(SignalRank(self.number, rank, number))

    def dump(self, patience: float, ranks: Iterable[int] | None = None) -> None:
        """Have these ranks, or all that are still running, write their stacks and flight recorders."""
        self.dumped, self.undumped = False, set(self.others)
        self._tell(Dump(self.number, tuple(self.alive if ranks is None else ranks), patience))
        self.wait_until(lambda: self.dumped and not self.undumped.intersection(self.others), patience)

    def look(self, ranks: Iterable[int]) -> None:
        """Ask these ranks, which are still running, for their collectives. They write these when they get to it."""
        self._tell(Look(self.number, tuple(ranks)))

    def wait_until(self, done: Callable[[], bool], patience: float = 0.0) -> None:
        """Wait until `done`, which a working server achieves at once; give up a server that is stuck."""
        until = now() + patience + ANSWER_PATIENCE
        while not done() and not self.lost:
            if not self.wait_for_event(until):
                self.server.give_up()


def _words_of(ranks: range) -> str:
    numbers = ", ".join(map(str, ranks)) if len(ranks) <= _MOST_LISTED else f"{ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
