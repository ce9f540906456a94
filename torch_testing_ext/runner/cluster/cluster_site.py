"""The nodes of a cluster as the site of a run, and as the place where its units run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch_testing_ext._process.loop import EventLoop

from ..engine.engine import Engine
from ..engine.place import LostUnitListener
from ..events import Reporter, Warned
from ..model import Lease, NodeOfRun, RunHeader, Unit
from ..options.options import ALL_CPUS, Options
from ..processes.file_processes import Discovery
from ..run_site import Found, Work
from ..scheduling.inventory import Inventory
from ..scheduling.node_leases import NodeLeases
from ..scheduling.policy import Priority, Queue
from .agent_messages import CloseFile, FindTests, PrepareNode, RunUnit
from .bridge_protocol import Connect
from .cluster_nodes import ClusterError, ClusterNodes, NodeLauncher
from .node_environment import environment_for_nodes
from .ray_actor import digest_of
from .ray_launcher import RayLauncher
from .remote import RemoteNode, RemoteUnit
from .shipping import pack
from .slurm import SLURM, slurm_launcher

TELL_INTERVAL = 10.0  # seconds between two lines about what the run waits for


@contextmanager
def on_cluster(options: Options, root: Path) -> Iterator[ClusterSite]:
    """The nodes of the cluster that the options name, where agents are started."""
    warnings: list[str] = []  # about what is packed for the nodes
    leases = NodeLeases()
    with TemporaryDirectory(prefix="torch_testing_ext_run_", ignore_cleanup_errors=True) as name:
        launcher = _launcher(options, root, Path(name), warnings)
        with ClusterPlace(launcher, leases, options.cluster_timeout, _say) as place:
            yield ClusterSite(place, leases, warnings)


class ClusterSite:
    """The nodes of a cluster, where tests are found and run by agents."""

    def __init__(self, place: ClusterPlace, leases: NodeLeases, warnings: Sequence[str]):
        self._place = place
        self._leases = leases
        self._warnings = warnings
        self.torch_version = ""  # known when the nodes are ready

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self._warnings, *self._place.nodes.warnings)

    def discover(self, files: Sequence[str]) -> Found:
        place = self._place
        place.wait_for_nodes()
        nodes = tuple(
            NodeOfRun(name, node.devices, node.slots, node.most_at_once) for name, node in place.nodes.ready.items()
        )
        ready = tuple(place.nodes.ready.values())
        self.torch_version = ready[0].torch
        inventory = Inventory(
            tuple(f"{node.name}:{device}" for node in nodes for device in node.devices),
            next((one.kind for one in ready if one.kind), None),
            any(one.fake for one in ready),
            nodes=nodes,
        )
        discovery = place.discover(tuple(files), max(node.slots for node in nodes))
        return Found(inventory, sum(node.slots for node in nodes), discovery)

    def schedule(self, work: Work, first: Priority) -> tuple[Queue, NodeLeases]:
        return Queue(work.plan.units, self._leases, first), self._leases

    def engine(
        self, work: Work, first: Priority, reporter: Reporter, header: RunHeader
    ) -> tuple[Engine, tuple[str, ...]]:
        queue, leases = self.schedule(work, first)
        self._place.nodes.warn = lambda text: reporter.on_event(Warned(text))
        return Engine(self._place, work.options, work.inventory, leases, queue, reporter, header), ()


def _launcher(options: Options, root: Path, folder: Path, warnings: list[str]) -> NodeLauncher:
    address, shared, environ = options.cluster, options.cluster_root, environment_for_nodes(os.environ)
    assert address is not None
    prepare = PrepareNode(
        root=str(shared or root),
        drop_in=bool(options.drop_in),
        all_marks=bool(options.marks),
        jobs=None if options.jobs == ALL_CPUS else options.jobs,
        devices=options.cluster_gpus_per_node,
        fake_devices=(),
        timeout=options.timeout,
        slow=options.slow,
        stream=options.stream,
        command=options.command,
        environ=environ,
        sanitize=options.sanitize,
        sanitize_order=options.sanitize_order,
        shake_seed=options.shake_seed,
        undo_worker=address != SLURM,
    )
    if address == SLURM:
        return slurm_launcher(options, root, prepare, folder, os.environ)
    archive = folder / "project.tar"
    if shared is None:
        warnings += pack(root, archive)
    connect = Connect(
        address=address,
        nodes=options.cluster_nodes,
        gpus_per_node=options.cluster_gpus_per_node,
        folder=str(folder),
        archive="" if shared is not None else str(archive),
        root=str(shared or ""),
        digest=digest_of(str(root)) if shared is not None else "",
        setup=options.cluster_setup or "",
        environ=environ,
        on_path=not options.drop_in,
    )
    return RayLauncher(connect, prepare, folder / "ray.log", options.cluster_fake_gpus)


def _say(text: str) -> None:
    print(f"run_test.py: {text}", file=sys.stderr, flush=True)


# -- the place


class ClusterPlace:
    """The nodes of a run, on which tests are found and units run: `with ClusterPlace(...) as place:`."""

    def __init__(self, launcher: NodeLauncher, leases: NodeLeases, timeout: float, say: Callable[[str], object]):
        """`timeout`: how long to wait for nodes, in seconds."""
        self.loop = EventLoop()
        self.nodes = ClusterNodes(launcher, leases, self.loop, say)
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
