"""The nodes of a cluster as the place where units run."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_testing_ext._process.loop import EventLoop

from ..engine.place import LostUnitListener
from ..model import Lease, Unit
from ..processes.file_processes import Discovery
from ..scheduling.node_leases import NodeLeases
from .agent_messages import CloseFile, FindTests, RunUnit
from .cluster_nodes import ClusterError, ClusterNodes, NodeLauncher
from .remote import RemoteNode, RemoteUnit

TELL_INTERVAL = 10.0  # seconds between two lines about what the run waits for


class ClusterPlace:
    """The nodes of a run, on which tests are found and units run: `with ClusterPlace(...) as place:`."""

    def __init__(
        self,
        launcher: NodeLauncher,
        leases: NodeLeases,
        timeout: float,
        say: Callable[[str], object],
        warn: Callable[[str], object],
    ):
        """`timeout`: how long to wait for nodes, in seconds."""
        self.loop = EventLoop()
        self.nodes = ClusterNodes(launcher, leases, self.loop, say, warn)
        self._launcher = launcher
        self._timeout = timeout
        self._say = say
        self._wait: tuple[int, float] | None = None  # how many nodes had joined when it began, and until when

    def __enter__(self) -> ClusterPlace:
        self.nodes.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.nodes.close()
        self.loop.close()

    # -- before the run

    def wait_for_nodes(self) -> None:
        """Wait until the nodes are ready that the run begins with. Raises ClusterError."""
        until, tell_at = time.monotonic() + self._timeout, time.monotonic() + TELL_INTERVAL
        while not self._can_begin():
            if self.nodes.refused:
                raise ClusterError(self.nodes.refused)
            if failure := self._launcher.failure:
                raise ClusterError(": ".join([failure, *self.nodes.lost[-1:]]))
            now = time.monotonic()
            if now >= until:
                raise ClusterError(f"no run after {self._timeout:g} s of waiting: {self.nodes.awaited}")
            if now >= tell_at:
                self._say(f"waiting for {self.nodes.awaited}")
                tell_at = now + TELL_INTERVAL
            self.loop.step(min(until, tell_at))
        self.nodes.has_begun = True

    def _can_begin(self) -> bool:
        ready, expected = len(self.nodes.ready), self._launcher.expected
        if self.nodes.refused or ready < max(1, expected):
            return False
        return bool(expected) or (ready == len(self.nodes) and not self._launcher.waits_for)

    @property
    def most_at_once(self) -> int:
        """The most devices that one process can use."""
        return max((node.most_at_once for node in self.nodes.ready.values()), default=0)

    def discover(self, files: tuple[str, ...], jobs: int) -> Discovery:
        """Have the largest node import the files. If it is lost meanwhile, another does."""
        finder: RemoteNode | None = None
        while finder is None or finder.found is None:
            if finder is None or finder.is_lost:
                finder = self.nodes.largest
                finder.found = None
                finder.send(FindTests(files, self.most_at_once, jobs))
            self.loop.step()
        found = finder.found
        return Discovery(found.tests, found.broken, found.not_run, found.warnings)

    # -- the place of the engine

    def start(self, unit: Unit, lease: Lease, listener: LostUnitListener) -> RemoteUnit:
        return self.nodes.remote(lease.node).run(RunUnit(unit, lease, self.most_at_once), listener)

    def close_file(self, name: str) -> None:
        self.nodes.send(CloseFile(name))

    def wait_for_more(self) -> bool:
        """No unit runs, and none that waits fits: nodes may come for a while."""
        now = time.monotonic()
        if self._wait is None or self._wait[0] != self.nodes.joined:
            until = now + (self._timeout if not self._launcher.failure else 0.0)
            self._wait = self.nodes.joined, until
            self.loop.at(until, lambda: None)
            self._say(f"waiting for a node: {self.nodes.awaited}")
        return now < self._wait[1] and not self._launcher.failure

    @property
    def shortage(self) -> str:
        """Why units that wait fit nowhere."""
        left = f"the {len(self.nodes)} nodes that are left are too small" if len(self.nodes) else "no node is left"
        return ": ".join([left, *self.nodes.lost[-1:]])
