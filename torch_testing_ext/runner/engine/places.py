"""The place where units run.

The seam between the engine, which decides, and the processes. LocalPlace is this machine. A cluster is another place
(runner/cluster/cluster_site.py): on each of its nodes, an agent has a LocalPlace.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch_testing_ext._machine.device_locks import leased_by_ancestors, leased_for
from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext.runner import rank_settings, run_again
from torch_testing_ext.runner.model import Lease, Unit
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.processes.file_processes import FileProcesses
from torch_testing_ext.runner.scheduling.inventory import Inventory, environment_of

from .other_runs import OtherRuns
from .running_unit import RunningUnit, UnitHandle, UnitListener


class Place:
    """Starts units and owns their processes."""

    loop: EventLoop

    def start(self, unit: Unit, lease: Lease, listener: UnitListener) -> UnitHandle:
        """Start a unit. Raises OSError if the system refuses what it needs."""
        raise NotImplementedError

    def close_file(self, name: str) -> None:
        """End the process of a file, of which no unit runs or waits."""

    def wait_for_more(self) -> bool:
        """No unit runs, and none that waits fits: whether this can change, so that waiting makes sense."""
        return False

    @property
    def shortage(self) -> str:
        """Why units that wait fit nowhere, in words."""
        return "it does not fit on this machine"

    def is_finishing(self) -> bool:
        """The last unit has ended: whether something else is still to come, such as files from other machines."""
        return False

    def hurry(self) -> None:
        """The user has interrupted the run twice: wait for nothing that may not come."""


@dataclass
class LocalPlace(Place):
    """This machine: units run in the processes of a preloaded server, which are killed when the user is in a hurry."""

    files: FileProcesses
    options: Options
    inventory: Inventory
    others: OtherRuns | None = None
    # About a test whose name is appended; None for those of the options.
    command: str | None = None
    show_command: str | None = None
    # The ports of NCCL's RAS.
    _ports: ExitStack = field(default_factory=ExitStack)
    _port_of: dict[tuple[str | int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = self.files.loop

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
        environ = {**environment_of(lease, self.inventory), **self._address_of_ras(lease)}
        locks: tuple[int, ...] = ()
        if lease.devices:
            # Also if this run agrees with no other: what the test starts waits for none of these.
            identities = map(self.inventory.identity_of, lease.devices)
            environ.update(leased_for(identities, leased_by_ancestors(os.environ)))
        if self.others is not None:
            locks = self.others.locks.descriptors(lease.devices)
        environ.update(rank_settings.of_ranks(self.options, unit.repetition))
        environ.update(rank_settings.of_debugger(self.options))
        command = run_again.command(self.options) if self.command is None else self.command
        show_command = run_again.show_command(self.options) if self.show_command is None else self.show_command
        return RunningUnit(
            unit,
            lease,
            self.files,
            self.options,
            environ,
            listener,
            run_again.with_delays(command, self.options, unit.repetition),
            show_command,
            locks,
        )

    def close_file(self, name: str) -> None:
        self.files.file(name).close()
