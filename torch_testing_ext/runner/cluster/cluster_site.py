"""The nodes of a cluster as the site of a run."""

from __future__ import annotations

import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch_testing_ext._process import user_commands
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.private_folders import locked_folder
from torch_testing_ext._process.setting_names import LOGS
from torch_testing_ext._process.words import first_names
from torch_testing_ext.runner import run_again
from torch_testing_ext.runner.engine.running_unit import UnitListener
from torch_testing_ext.runner.events import Reporter, Warned
from torch_testing_ext.runner.load_as import FilesFound
from torch_testing_ext.runner.loading import load_as_of
from torch_testing_ext.runner.model import Lease, NodeOfRun, Unit
from torch_testing_ext.runner.options import ALL_CPUS, CannotRun, Options, UsageError
from torch_testing_ext.runner.processes.file_processes import Discovery
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.node_leases import NodeLeases
from torch_testing_ext.runner.scheduling.protocol import RunLeases
from torch_testing_ext.runner.scheduling.unit_queue import Queue
from torch_testing_ext.runner.site_protocol import Found, Preparation, RunSite, Work

from .agent_messages import CloseFile, ClusterError, FindFilesOfProject, FindTests, PrepareNode, RunUnit
from .bridge_messages import Connect
from .cluster_nodes import ClusterNodes, NodeLauncher
from .node_choice import Wish
from .node_environment import environment_for_nodes, notes_on_environment
from .project_changes import ComingBack
from .ray_actor import digest_of
from .ray_launcher import RayLauncher
from .remote_node import RemoteNode, RemoteUnit
from .shipment import Shipment, choose_files, sent_file, split_path, write_tar
from .slurm import SLURM, slurm_launcher

# The folder of the project's copies for TORCH_TESTING_EXT_LOGS.
LOGS_OF_NODES = "torch_testing_ext_logs"
# Seconds between two lines about what the run waits for.
TELL_INTERVAL = 10.0
_NOTHING_TO_FETCH = "cluster.fetch is for a project that is sent to the nodes: these share its folder"


@contextmanager
def on_slurm(options: Options, root: Path, files: Sequence[str]) -> Iterator[ClusterSite]:
    """The nodes of a Slurm allocation, which share the project's folder: the site `slurm`."""
    if options.cluster_fake_gpus:
        raise UsageError("--cluster slurm and cluster.fake-gpus cannot be combined: Slurm names no accelerators")
    if options.cluster_fetch:
        raise UsageError(_NOTHING_TO_FETCH)
    with locked_folder("torch_testing_ext_run_") as folder:
        launcher = slurm_launcher(options, root, _prepare(options, root), folder, os.environ)
        with _on_nodes(launcher, options, _notes(options)) as site:
            yield site


@contextmanager
def on_ray(options: Options, root: Path, files: Sequence[str]) -> Iterator[ClusterSite]:
    """The nodes of a Ray cluster: the site `ray`. Without a shared folder, these get a copy of the project."""
    if options.cluster_fetch and options.cluster_root is not None:
        raise UsageError(_NOTHING_TO_FETCH)
    warnings = _notes(options)
    with locked_folder("torch_testing_ext_run_") as folder, ExitStack() as open_files:
        if options.cluster_root is not None:
            launcher, coming_back = _by_ray(options, root, folder, warnings), None
        else:
            launcher, coming_back = _with_copies(options, root, files, folder, warnings, open_files)
        with _on_nodes(launcher, options, warnings, coming_back) as site:
            yield site


def _notes(options: Options) -> list[str]:
    return notes_on_environment(os.environ, options.cluster_env)


@contextmanager
def _on_nodes(
    launcher: NodeLauncher, options: Options, warnings: list[str], coming_back: ComingBack | None = None
) -> Iterator[ClusterSite]:
    """The nodes on which a launcher starts agents. `coming_back`: what writes the files that tests change there."""
    with ClusterSite(launcher, NodeLeases(), options.cluster_timeout, _say, warnings) as site:
        site.nodes.coming_back = coming_back
        yield site


def shipment(root: Path, files: Sequence[str]) -> Shipment:
    """Choose what is sent: also test files that git ignores, and folders of the project on PYTHONPATH."""
    below, _ = split_path(os.environ.get("PYTHONPATH", ""), root, Path.cwd())
    return choose_files(root, [*files, *(name for name in below if name != ".")])


def clean(options: Options) -> int:
    """Remove what the nodes of a Ray cluster have kept for runs, and say so. Returns the exit code."""
    options = replace(options, cluster=options.cluster or "auto")
    if options.cluster == SLURM:
        raise UsageError("cluster clean is for Ray: with Slurm, nodes keep nothing")
    with locked_folder("torch_testing_ext_run_") as folder:
        launcher = _by_ray(options, Path.cwd(), folder, [], cleans=True)
        with ClusterSite(launcher, NodeLeases(), options.cluster_timeout, _say) as site:
            # The launcher fails, too, when all is done.
            while not launcher.failure:
                site.loop.step()
    for node in launcher.cleaned:
        print(f"node {node.name}: removed {', '.join(node.removed) or 'nothing'}")
    if not launcher.cleaned:
        raise ClusterError(launcher.failure)
    return 0


def _prepare(options: Options, root: Path) -> PrepareNode:
    return PrepareNode(
        root=str(options.cluster_root or root),
        options=options,
        jobs=None if options.jobs == ALL_CPUS else options.jobs,
        fake_devices=(),
        command=run_again.command(options),
        show_command=run_again.show_command(options),
        environ=environment_for_nodes(os.environ, options.cluster_env),
        undo_worker=options.cluster != SLURM,
        load_as=load_as_of(options, root),
    )


def _with_copies(
    options: Options,
    root: Path,
    files: Sequence[str],
    folder: Path,
    warnings: list[str],
    open_files: ExitStack,
) -> tuple[RayLauncher, ComingBack]:
    """The launcher for nodes that get a copy of the project, and what brings files back from there."""
    archive = folder / "project.tar"
    sent = shipment(root, files)
    write_tar(sent, archive)
    warnings += sent.warnings
    launcher = _by_ray(options, root, folder, warnings, archive=str(archive), times=sent.times)
    launcher.copies_of = str(root)
    environ = dict(launcher.prepare.environ)
    elsewhere = {}
    logs = environ.get(LOGS)
    if logs:
        elsewhere[LOGS_OF_NODES] = Path(logs).expanduser().absolute()
        environ[LOGS] = LOGS_OF_NODES
    launcher.prepare = replace(
        launcher.prepare,
        environ=environ,
        fetch=(*options.cluster_fetch, *elsewhere),
        accepts=bool(environ.get("EXPECTTEST_ACCEPT")),
    )
    return launcher, ComingBack(root, partial(sent_file, open_files.enter_context(tarfile.open(archive))), elsewhere)


def _by_ray(options: Options, root: Path, folder: Path, warnings: list[str], **more: Any) -> RayLauncher:
    """The launcher for a Ray cluster. `more`: of the copies that nodes get of the project."""
    assert options.cluster is not None
    prepare = _prepare(options, root)
    shared = options.cluster_root
    below, elsewhere = split_path(os.environ.get("PYTHONPATH", ""), root, Path.cwd())
    if elsewhere:
        names = first_names(elsewhere)
        warnings.append(f"entries of PYTHONPATH outside of the project are not sent to the nodes: {names}")
    path = tuple(below)
    if not options.drop_in:
        path = tuple(dict.fromkeys([".", *below]))
    wish = Wish(
        options.cluster,
        options.cluster_nodes,
        options.cluster_gpus_per_node,
        prepare.jobs,
        options.cluster_only,
        options.cluster_not,
    )
    connect = Connect(
        wish,
        folder=str(folder),
        root=str(shared or ""),
        digest=digest_of(str(root)) if shared else "",
        setup=options.cluster_setup or "",
        environ=prepare.environ,
        path=path,
        **more,
    )
    return RayLauncher(connect, prepare, folder / "ray.log", options.cluster_fake_gpus)


def _say(text: str) -> None:
    print(f"{user_commands.runner_name()}: {text}", file=sys.stderr, flush=True)


class ClusterSite(RunSite):
    """The nodes of a run, on which tests are found and units run: `with ClusterSite(...) as site:`."""

    def __init__(
        self,
        launcher: NodeLauncher,
        leases: NodeLeases,
        timeout: float,
        say: Callable[[str], object],
        notes: Sequence[str] = (),
    ):
        """`timeout`: how long to wait for nodes, in seconds; `notes`: warnings from before the nodes have come."""
        self._loop = EventLoop()
        # Known when the nodes are ready.
        self._torch_version = ""
        self._leases = leases
        self._notes = notes
        self.nodes = ClusterNodes(launcher, leases, self._loop, say)
        self._launcher = launcher
        self._timeout = timeout
        self._say = say
        # The number of nodes that had joined when it began, and its end.
        self._wait: tuple[int, float] | None = None

    def __enter__(self) -> ClusterSite:
        self.nodes.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.nodes.close()
        self._loop.close()

    @property
    def loop(self) -> EventLoop:
        return self._loop

    @property
    def torch_version(self) -> str:
        return self._torch_version

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self._notes, *self.nodes.troubles.warnings)

    def discover(self, files: Sequence[str], reporter: Reporter) -> Found:
        """Wait for nodes, and have one of them find the tests."""
        self.wait_for_nodes()
        ready = self.nodes.ready
        self._torch_version = next(iter(ready.values())).torch
        nodes = []
        devices = []
        kind = None
        for name, facts in ready.items():
            nodes.append(NodeOfRun(name, facts.devices, facts.slots, facts.most_at_once))
            devices += [f"{name}:{device}" for device in facts.devices]
            kind = kind or facts.kind or None
        is_fake = any(facts.fake for facts in ready.values())
        inventory = Inventory(tuple(devices), kind, is_fake, nodes=tuple(nodes))
        slots = [node.slots for node in nodes]
        discovery = self.find_tests(tuple(files), max(slots))
        return Found(inventory, sum(slots), discovery)

    def wait_for_nodes(self) -> None:
        """Wait until the nodes are ready that the run begins with. Raises ClusterError."""
        until = time.monotonic() + self._timeout
        tell_at = time.monotonic() + TELL_INTERVAL
        while not self._can_begin():
            if self._launcher.failure:
                raise ClusterError(self.nodes.troubles.why_none(self._launcher.failure))
            now = time.monotonic()
            if self._launcher.is_connecting:
                until = now + self._timeout
            if now >= until:
                raise ClusterError(f"no run after {self._timeout:g} s of waiting: {self.nodes.awaited}")
            if now >= tell_at:
                self._say(f"waiting for {self.nodes.awaited}")
                tell_at = now + TELL_INTERVAL
            self._loop.step(min(until, tell_at))

    def _can_begin(self) -> bool:
        ready = len(self.nodes.ready)
        expected = self._launcher.expected
        if ready < max(1, expected):
            return False
        if expected:
            return True
        return ready == len(self.nodes) and not self._launcher.waits_for

    @property
    def most_at_once(self) -> int:
        """The most devices that one process can use."""
        return max((node.most_at_once for node in self.nodes.ready.values()), default=0)

    def find_tests(self, files: tuple[str, ...], jobs: int) -> Discovery:
        """Have the largest node import the files. If it is lost meanwhile, another does."""
        finder: RemoteNode | None = None
        while finder is None or finder.found is None:
            if finder is None or finder.is_lost:
                finder = self._largest_node()
                finder.found = None
                finder.send(FindTests(files, self.most_at_once, jobs))
            self._loop.step()
        return finder.found

    def find_files(self, importing: Sequence[str] = ()) -> FilesFound:
        """Have the largest node ask pytest which files it collects. If it is lost meanwhile, another does."""
        self.wait_for_nodes()
        finder: RemoteNode | None = None
        while finder is None or finder.files_found is None:
            if finder is None or finder.is_lost:
                finder = self._largest_node()
                finder.files_found = None
                finder.send(FindFilesOfProject())
            self._loop.step()
        return finder.files_found

    def _largest_node(self) -> RemoteNode:
        """Raises CannotRun if none is left."""
        ready = self.nodes.ready
        if not ready:
            raise CannotRun(f"no node is left: {self.nodes.troubles.lost[-1]}")
        largest = max(ready, key=lambda name: (ready[name].most_at_once, ready[name].slots))
        return self.nodes.remote(largest)

    def leases(self, work: Work) -> NodeLeases:
        return self._leases

    def prepare(self, work: Work, queue: Queue, leases: RunLeases, reporter: Reporter) -> Preparation:
        """Let nodes that join during the run have their part of it."""

        def waiting() -> int:
            # A run without end always has units for a node.
            return 1 if work.options.endless else len(queue)

        def show(warning: str) -> None:
            reporter.on_event(Warned(warning))

        self.nodes.waiting = waiting
        self.nodes.troubles.show = show
        return Preparation()

    def start(self, unit: Unit, lease: Lease, listener: UnitListener) -> RemoteUnit:
        return self.nodes.remote(lease.node).run(RunUnit(unit, lease, self.most_at_once), listener)

    def close_file(self, name: str) -> None:
        self.nodes.send(CloseFile(name))

    def wait_for_more(self) -> bool:
        """No unit runs, and none that waits fits: nodes may come for a while."""
        now = time.monotonic()
        if self._wait is None or self._wait[0] != self.nodes.joined:
            until = now
            if not self._launcher.failure:
                until += self._timeout
            self._wait = self.nodes.joined, until
            self._loop.at(until, lambda: None)
            self._say(f"waiting for a node: {self.nodes.awaited}")
        return now < self._wait[1] and not self._launcher.failure

    def is_finishing(self) -> bool:
        return self.nodes.are_sending()

    def hurry(self) -> None:
        self.nodes.hurry()

    @property
    def shortage(self) -> str:
        """Why units that wait fit nowhere."""
        left = f"the {len(self.nodes)} nodes that are left are too small" if len(self.nodes) else "no node is left"
        lost = self.nodes.troubles.lost
        return f"{left}: {lost[-1]}" if lost else left
