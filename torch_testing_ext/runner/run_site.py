"""This machine as the site of a run."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext._machine import fake_accelerator
from torch_testing_ext._machine.device_locks import DeviceLocks, lease_folder, leased_by_ancestors, leased_for
from torch_testing_ext._machine.device_sharing import RANKS_PER_GPU
from torch_testing_ext._machine.nvml import (
    Gpu,
    gpus_by_name,
    matching_gpus,
    may_have_nvidia_gpus,
    open_nvml,
    warnings_about_devices,
)
from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._machine.visible_devices import problem_of_mask
from torch_testing_ext._process import words
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.private_folders import UnsafeFolder
from torch_testing_ext._process.questions import NoAnswer, Silence
from torch_testing_ext._process.running_coverage import current_coverage
from torch_testing_ext.runner.scheduling.inventory import (
    Inventory,
    environment_of,
    make_inventory,
    planned_devices,
    with_nvlinks,
)
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.protocol import RunLeases
from torch_testing_ext.runner.scheduling.unit_queue import Queue
from torch_testing_ext.runner.warm.warm_client import WarmServer, find_server

from . import aspects_of_run, run_again
from .events import Importing, Reporter, Warned
from .loading import load_as_of
from .model import Lease, Unit
from .options import CannotRun, Options, UsageError, Warm
from .site_protocol import Found, Preparation, RunSite, Work

if TYPE_CHECKING:
    from torch_testing_ext._machine.fake_accelerator.shared_memory import SharedMemory
    from torch_testing_ext.runner.engine.memory_return import MemoryReturn
    from torch_testing_ext.runner.engine.other_runs import OtherRuns
    from torch_testing_ext.runner.engine.running_unit import RunningUnit, UnitListener
    from torch_testing_ext.runner.load_as import FilesFound
    from torch_testing_ext.runner.processes.file_processes import FileProcesses, Reads


@contextmanager
def on_this_machine(options: Options, root: Path, files: Sequence[str]) -> Iterator[LocalSite]:
    """This machine, with a preloaded server that gets ready for the files."""
    from torch_testing_ext.runner.processes.file_processes import FileProcesses
    from torch_testing_ext.runner.processes.preloaded_client import warm_up_for

    environ = {}
    if options.ranks_per_gpu > 1:
        # The world size of a test may depend on it.
        environ[RANKS_PER_GPU] = str(options.ranks_per_gpu)
    load_as = load_as_of(options, root)
    warm_up = warm_up_for(root, files, load_as.by_pytest)
    with ExitStack() as owner:
        # Before the run adopts processes, and ends those that it has not started.
        server = _warm_server(options, root, environ, warm_up.modules)
        if server is not None:
            owner.callback(server.close)
        warm_up = dataclasses.replace(warm_up, server=server)
        processes = FileProcesses(root, warm_up, bool(options.drop_in), environ, load_as=load_as)
        yield LocalSite(options, owner.enter_context(processes))


def _warm_server(options: Options, root: Path, environ: Mapping[str, str], modules: Iterable[str]) -> WarmServer | None:
    """The warm server that the options allow, if one runs or can be started."""
    if options.warm is Warm.NEVER or options.drop_in or os.environ.get(fake_accelerator.COUNT):
        return None
    # A server that runs already measures nothing.
    is_measured = current_coverage() is not None
    if options.warm is Warm.AUTO and (is_measured or "CI" in os.environ):
        return None
    path = [str(root), *sys.path]
    return find_server(root, path, {**os.environ, **environ}, modules, may_start=options.warm is Warm.START)


@dataclass
class LocalSite(RunSite):
    """This machine: units run in the processes of a preloaded server, which are killed when the user is in a hurry."""

    options: Options
    files: FileProcesses
    # Known when devices have been found.
    inventory: Inventory = field(default_factory=Inventory)
    # About a test whose name is appended; None for those of the options.
    command: str | None = None
    show_command: str | None = None
    _others: OtherRuns | None = None
    # The ports of NCCL's RAS.
    _ports: ExitStack = field(default_factory=ExitStack)
    _port_of: dict[tuple[str | int, ...], int] = field(default_factory=dict)

    @property
    def loop(self) -> EventLoop:
        return self.files.loop

    @property
    def torch_version(self) -> str:
        version = self.files.torch_version
        return f"{version}, warm" if self.files.is_warm else version

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings about files so far."""
        return self.files.warnings

    def reads(self) -> Reads:
        """The files that tests and imports have read."""
        return self.files.reads()

    def find_files(self, importing: Sequence[str] = ()) -> FilesFound:
        if not importing:
            return self.files.find_files()
        inventory, _ = self._devices
        return self.files.find_files(importing, inventory.most_ranks)

    @functools.cached_property
    def _devices(self) -> tuple[Inventory, tuple[str, ...]]:
        """The devices of the run, and warnings about them."""
        return find_devices(self.files, self.options)

    def discover(self, files: Sequence[str], reporter: Reporter) -> Found:
        # torch, in the preloaded server.
        reporter.on_event(Importing((), len(files), len(files), time.time()))
        inventory, warnings = self._devices

        def tell(importing: list[str], left: int) -> None:
            reporter.on_event(Importing(tuple(importing), left, len(files), time.time()))

        discovery = self.files.discover(files, inventory.most_ranks, self.options.jobs, tell)
        return Found(inventory, self.options.jobs, discovery, warnings)

    def leases(self, work: Work) -> Leases:
        inventory = work.inventory
        return Leases(inventory.names, work.options.jobs, inventory.facts, inventory.shared_backend)

    def prepare(self, work: Work, queue: Queue, leases: RunLeases, reporter: Reporter) -> Preparation:
        """Lock devices that other runs may want, and check their memory between tests."""
        from torch_testing_ext.runner.engine.other_runs import OtherRuns

        self.options, self.inventory = work.options, work.inventory
        if not any(unit.devices for unit in work.plan.units):
            return Preparation()
        assert isinstance(leases, Leases)
        warnings: list[str] = []
        locks = _device_locks(work, warnings)
        if locks is not None:
            self._others = OtherRuns(locks, leases)
        memory = self._memory_return(work, leases, reporter, warnings)
        return Preparation(memory, self._others, tuple(warnings))

    def _memory_return(
        self,
        work: Work,
        leases: Leases,
        reporter: Reporter,
        warnings: list[str],
    ) -> MemoryReturn | None:
        """Create the memory check, if NVML is available; else a warning."""
        from torch_testing_ext.runner.engine.memory_return import MemoryReturn, uuids_for

        inventory = work.inventory
        if inventory.kind not in ("cuda", fake_accelerator.KIND) or inventory.fake or not work.options.memory_check:
            return None
        try:
            nvml = open_nvml() if inventory.kind == "cuda" else open_shared_memory()
            uuids = uuids_for(inventory.identities, inventory.names, nvml.usage())
        except NoAnswer as error:
            warnings.append(f"device memory is not checked between tests: {error}")
            return None

        def warn(text: str) -> None:
            reporter.on_event(Warned(text))

        return MemoryReturn(
            self.files.loop, nvml, uuids, warn, quarantine=leases.quarantine, is_ours=self.files.may_be_ours
        )

    def _address_of_ras(self, lease: Lease) -> dict[str, str]:
        """The address of NCCL's status: by default, all jobs of a machine would use the same port."""
        if not lease.devices:
            return {}
        # Only one unit at a time has them.
        place: tuple[str | int, ...] = (*lease.devices[:1], *lease.slots[:1])
        if place not in self._port_of:
            self._port_of[place] = self._ports.enter_context(leased_port())
        return {"NCCL_RAS_ADDR": f"localhost:{self._port_of[place]}"}

    def start(self, unit: Unit, lease: Lease, listener: UnitListener) -> RunningUnit:
        """Start a unit in processes of this machine."""
        from torch_testing_ext.runner.engine.running_unit import RunningUnit

        environ = {**environment_of(lease, self.inventory), **self._address_of_ras(lease)}
        locks: tuple[int, ...] = ()
        if lease.devices:
            # Also if this run agrees with no other: what the test starts waits for none of these.
            identities = map(self.inventory.identity_of, lease.devices)
            environ.update(leased_for(identities, leased_by_ancestors(os.environ)))
        if self._others is not None:
            locks = self._others.locks.descriptors(lease.devices)
        environ.update(aspects_of_run.variables(self.options, unit.repetition))
        command = run_again.command(self.options) if self.command is None else self.command
        show_command = run_again.show_command(self.options) if self.show_command is None else self.show_command
        return RunningUnit(
            unit,
            lease,
            self.files,
            self.options,
            environ,
            listener,
            run_again.of_repetition(command, self.options, unit.repetition),
            show_command,
            locks,
        )

    def close_file(self, name: str) -> None:
        self.files.file(name).close()


def open_shared_memory() -> SharedMemory:
    """Open the file in which the processes of this run count the memory of fake accelerators."""
    from torch_testing_ext._machine.fake_accelerator.shared_memory import SharedMemory

    return SharedMemory(Path(os.environ[fake_accelerator.MEMORY_FILE]))


def notes_on_sharing(inventory: Inventory, nccl: tuple[int, ...]) -> list[str]:
    """Warnings for the user before ranks share devices."""
    if inventory.ranks_per_device == 1:
        return []
    version = ".".join(str(number) for number in nccl) or "of this torch"
    if inventory.shared_backend not in ("gloo", "nccl"):
        consequence = f"they use {inventory.shared_backend}, which has to allow that"
    elif inventory.shared_backend == "gloo":
        consequence = f"they use gloo, as NCCL {version} does not allow that; tests of NCCL itself are skipped"
    else:
        consequence = (
            f"NCCL {version} allows that as an experiment, and may hang if they need too much of a GPU at once"
        )
    return [f"{inventory.ranks_per_device} ranks may share each GPU (--ranks-per-gpu): {consequence}"]


def find_devices(files: FileProcesses, options: Options) -> tuple[Inventory, tuple[str, ...]]:
    """The devices of this machine that the run may use, and warnings about them."""
    seen = files.count_devices()
    kind = seen.kind
    count = seen.count
    gpus = _ask_nvml(kind, options)

    def is_known(name: str) -> bool:
        if name.isdecimal():
            return int(name) < len(gpus)
        return bool(matching_gpus(name, gpus))

    if os.environ.get(fake_accelerator.COUNT) and kind not in (None, fake_accelerator.KIND):
        raise UsageError(fake_accelerator.refusal(kind))
    if planned_devices(options) is None:
        problem = problem_of_mask(os.environ, kind, count, is_known if gpus else None)
        if problem:
            raise UsageError(problem)
    inventory = make_inventory(options, os.environ, kind, count, seen.uuids, seen.facts, seen.nccl, seen.backend)
    gpus_of_devices = gpus_by_name(inventory.names, inventory.identities, gpus, os.environ)
    inventory = with_nvlinks(inventory, gpus_of_devices)
    warnings = [*warnings_about_devices(gpus_of_devices), *notes_on_sharing(inventory, seen.nccl)]
    if seen.why_none and planned_devices(options) is None:
        known = f", though NVML knows {words.count(len(gpus), 'GPU')}" if gpus else ""
        warnings.insert(0, f"no GPU can be used{known}: {seen.why_none}")
    return inventory, tuple(warnings)


def _ask_nvml(kind: str | None, options: Options) -> tuple[Gpu, ...]:
    """All GPUs of this machine, as NVML knows them; none if it cannot be asked, or need not be."""
    if kind not in (None, "cuda") or planned_devices(options) is not None or not may_have_nvidia_gpus():
        return ()
    try:
        nvml = open_nvml()
    except NoAnswer as error:
        if error.silence is Silence.LATE:
            raise CannotRun(str(error)) from None
        return ()
    gpus = nvml.gpus()
    nvml.close()
    return gpus


def _device_locks(work: Work, warnings: list[str]) -> DeviceLocks | None:
    """Create the locks that keep devices from other runs; None, and a warning, if that fails."""
    options = work.options
    inventory = work.inventory
    if not options.shared_leases:
        return None
    try:
        return DeviceLocks(
            options.lease_folder or lease_folder(os.environ),
            {name: inventory.identity_of(name) for name in inventory.names},
            f"pid {os.getpid()}: {shlex.join(sys.orig_argv)}",
            leased_by_ancestors(os.environ),
        )
    except (OSError, UnsafeFolder) as error:
        warnings.append(f"other runs may use the same devices at the same time: {error}")
        return None
