"""One run on the nodes of a cluster: like a run on this machine, but tests are found and run by agents."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine.engine import Engine
from ..events import Reporters, Warned
from ..model import NodeOfRun, RunHeader
from ..options.options import ALL_CPUS, Options
from ..processes.file_processes import Discovery
from ..scheduling.inventory import Inventory
from ..scheduling.node_leases import NodeLeases
from ..scheduling.plan import priority
from ..scheduling.policy import Queue
from ..session import Session, Work
from .bridge_protocol import Connect
from .environment import environment_for_nodes
from .place import ClusterPlace, NodeLauncher
from .protocol import PrepareNode
from .ray_actor import digest_of
from .ray_launcher import RayLauncher
from .shipping import pack
from .slurm import SLURM, slurm_launcher


class ClusterSession(Session):
    """One invocation of run_test.py with --cluster."""

    def __init__(self, options: Options, root: Path):
        super().__init__(dataclasses.replace(options, jobs=1), root)  # known when the nodes are
        self._jobs = None if options.jobs == ALL_CPUS else options.jobs
        self._node_leases = NodeLeases()

    def run(self) -> int:
        """Does what the options say, and returns the exit code."""
        with tempfile.TemporaryDirectory(prefix="torch_testing_ext_run_", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            return super().run()

    def _zygote(self, files: Sequence[str]) -> ClusterPlace:
        return ClusterPlace(
            self._launcher(), self._node_leases, self._options.cluster_timeout, _say, self._warnings.append
        )

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
            jobs=self._jobs,
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

    def _discover(self, zygote: Any, files: Sequence[str]) -> tuple[Inventory, Discovery]:
        place: ClusterPlace = zygote
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
        self._options = dataclasses.replace(self._options, jobs=sum(node.slots for node in nodes))
        return inventory, place.discover(tuple(files), max(node.slots for node in nodes))

    def _leases(self, work: Work, locks: bool) -> NodeLeases:
        return self._node_leases

    def _queue(self, work: Work, leases: NodeLeases) -> Queue:
        queue = Queue(
            work.plan.units,
            leases.most_devices,
            leases.most_slots,
            priority(self._options, self._last_failed.failed),
            leases.may_run_now,
            leases,
        )
        leases.serve(queue)
        return queue

    def _engine(
        self, zygote: Any, work: Work, leases: Any, queue: Queue, reporters: Reporters, header: RunHeader
    ) -> Engine:
        place: ClusterPlace = zygote
        place.warn = lambda text: reporters.on_event(Warned(text))
        return Engine(place, self._options, work.inventory, leases, queue, reporters, header)


def _say(text: str) -> None:
    print(f"run_test.py: {text}", file=sys.stderr, flush=True)
