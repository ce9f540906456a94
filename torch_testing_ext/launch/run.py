"""One run of a job as the parent sees it: which of its ranks are alive, and requests to its fork server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch_testing_ext._process.loop import EventLoop

from .fork_server_messages import Dump, Probe, SignalGroups, SignalRank, ToServer
from .job import Job
from .rank_report import Exit, now

# A server answers in milliseconds unless it is importing a module. A server that is stuck must not block this process.
ANSWER_TIMEOUT = 30.0


class RankServer(Protocol):
    """The fork server of a run."""

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
    owns_server: bool = False  # the server ends with this run

    @property
    def alive(self) -> list[int]:
        """The ranks that are still running."""
        return [rank for rank in range(len(self.pids)) if rank not in self.exits and not self.lost]

    def wait_for_event(self, until: float | None = None) -> bool:
        """Wait for the next event and handle it. Returns False if the time `until` came first."""
        return self.server.step(until)

    def end(self, number: int) -> None:
        """Signal all ranks that are still running, with all processes in their groups."""
        self.server.send(SignalGroups(self.number, number))

    def signal(self, number: int, rank: int) -> None:
        """Signal one rank and no other process."""
        self.server.send(SignalRank(self.number, rank, number))

    def dump(self, timeout: float, ranks: Iterable[int] | None = None) -> None:
        """Have these ranks, or all that are still running, write their stacks and flight recorders."""
        self.dumped = False
        self.server.send(Dump(self.number, tuple(self.alive if ranks is None else ranks), timeout))
        self.wait_until(lambda: self.dumped, timeout)

    def probe(self, ranks: Iterable[int]) -> None:
        """Ask these ranks, which are still running, for their collectives. They write these when they get to it."""
        self.server.send(Probe(self.number, tuple(ranks)))

    def wait_until(self, done: Callable[[], bool], timeout: float = 0.0) -> None:
        """Wait until `done`, which a working server achieves at once; give up a server that is stuck."""
        until = now() + timeout + ANSWER_TIMEOUT
        while not done() and not self.lost:
            if not self.wait_for_event(until):
                self.server.give_up()
