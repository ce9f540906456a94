"""The nodes of a cluster as the site of a run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

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
from .cluster_place import ClusterPlace, NodeLauncher
from .node_environment import environment_for_nodes
from .ray_actor import digest_of
from .ray_launcher import RayLauncher
from .shipping import pack
from .slurm import SLURM, slurm_launcher


class ClusterSite:
    """The nodes of a cluster, where tests are found and run by agents."""

    def __init__(self, options: Options, root: Path):
        self._options = options
        self._root = root
        self._leases = NodeLeases()
        self._owner = ExitStack()
        self._warnings: list[str] = []  # about what is packed for the nodes

    def __enter__(self) -> ClusterSite:
        with self._owner as owner:
            folder = tempfile.TemporaryDirectory(prefix="torch_testing_ext_run_", ignore_cleanup_errors=True)
            self._folder = Path(owner.enter_context(folder))
            place = ClusterPlace(self._launcher(), self._leases, self._options.cluster_timeout, _say, lambda text: None)
            self._place = owner.enter_context(place)
            self._owner = owner.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.__exit__(kind, error, traceback)

    @property
    def torch_version(self) -> str:
        return self._place.torch_version

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self._warnings, *self._place.warnings)

    def _launcher(self) -> NodeLauncher:
        assert self._options.cluster is not None
        if self._options.cluster == SLURM:
            return slurm_launcher(self._options, self._root, self._prepare(), self._folder, os.environ)
        return RayLauncher(
            self._connect(self._options.cluster),
            self._prepare(),
            self._folder / "ray.log",
            self._options.cluster_fake_gpus,
        )

    def _connect(self, address: str) -> Connect:
        shared = self._options.cluster_root
        archive = self._folder / "project.tar"
        if shared is None:
            self._warnings += pack(self._root, archive)
        return Connect(
            address=address,
            nodes=self._options.cluster_nodes,
            gpus_per_node=self._options.cluster_gpus_per_node,
            folder=str(self._folder),
            archive="" if shared is not None else str(archive),
            root=str(shared or ""),
            digest=digest_of(str(self._root)) if shared is not None else "",
            setup=self._options.cluster_setup or "",
            environ=environment_for_nodes(os.environ),
            on_path=not self._options.drop_in,
        )

    def _prepare(self) -> PrepareNode:
        options = self._options
        return PrepareNode(
            root=str(options.cluster_root or self._root),
            drop_in=bool(options.drop_in),
            all_marks=bool(options.marks),
            jobs=None if options.jobs == ALL_CPUS else options.jobs,
            devices=options.cluster_gpus_per_node,
            fake_devices=(),
            timeout=options.timeout,
            slow=options.slow,
            stream=options.stream,
            command=options.command,
            environ=environment_for_nodes(os.environ),
            sanitize=options.sanitize,
            sanitize_order=options.sanitize_order,
            shake_seed=options.shake_seed,
            undo_worker=options.cluster != SLURM,
        )

    def discover(self, files: Sequence[str]) -> Found:
        place = self._place
        place.wait_for_nodes()
        nodes = tuple(
            NodeOfRun(name, node.devices, node.slots, node.most_at_once) for name, node in place.nodes.items()
        )
        ready = tuple(place.nodes.values())
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
        self._place.warn = lambda text: reporter.on_event(Warned(text))
        return Engine(self._place, work.options, work.inventory, leases, queue, reporter, header), ()


def _say(text: str) -> None:
    print(f"run_test.py: {text}", file=sys.stderr, flush=True)
