"""The nodes of a cluster as the site of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..engine.engine import Engine
from ..events import Reporter, Warned
from ..model import NodeOfRun, RunHeader
from ..options.options import ALL_CPUS, Options
from ..run_site import Found, Work
from ..scheduling.inventory import Inventory
from ..scheduling.node_leases import NodeLeases
from ..scheduling.policy import Priority, Queue
from .agent_messages import PrepareNode
from .bridge_protocol import Connect
from .cluster_nodes import NodeLauncher
from .cluster_place import ClusterPlace
from .node_environment import environment_for_nodes
from .ray_actor import digest_of
from .ray_launcher import RayLauncher
from .shipping import pack
from .slurm import SLURM, slurm_launcher


@contextmanager
def on_cluster(options: Options, root: Path) -> Iterator[ClusterSite]:
    """The nodes of the cluster that the options name, where agents are started."""
    warnings: list[str] = []  # about what is packed for the nodes
    leases = NodeLeases()
    with TemporaryDirectory(prefix="torch_testing_ext_run_", ignore_cleanup_errors=True) as name:
        launcher = _launcher(options, root, Path(name), warnings)
        with ClusterPlace(launcher, leases, options.cluster_timeout, _say, lambda text: None) as place:
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
