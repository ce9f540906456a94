"""The place where units run: the seam between the engine, which decides, and the processes. LocalPlace is this machine.

A cluster is another place (runner/cluster/cluster_site.py): on each of its nodes, an agent has a LocalPlace.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process.loop import EventLoop

from ..model import Lease, Unit
from ..options.options import Options
from ..processes.file_processes import FileProcesses
from ..scheduling.inventory import Inventory, environment_of
from .other_runs import OtherRuns
from .running_unit import Limits, RunningUnit, UnitHandle, UnitListener


class LostUnitListener(UnitListener):
    """Receives the events of running units, also that one was lost with its node."""

    def unit_lost(self, running: UnitHandle, rest: list[int], why: str) -> None: ...


class Place(Protocol):
    """Starts units and owns their processes."""

    @property
    def loop(self) -> EventLoop: ...

    def start(self, unit: Unit, lease: Lease, listener: LostUnitListener) -> UnitHandle:
        """Start a unit. Raises OSError if the system refuses what it needs."""

    def close_file(self, name: str) -> None:
        """End the process of a file, of which no unit runs or waits."""

    def wait_for_more(self) -> bool:
        """No unit runs, and none that waits fits: whether this can change, so that waiting makes sense."""

    @property
    def shortage(self) -> str:
        """Why units that wait fit nowhere, in words."""


class LocalPlace:
    """This machine: units run in the processes of a zygote."""

    shortage = "it does not fit on this machine"

    def __init__(
        self,
        files: FileProcesses,
        options: Options,
        inventory: Inventory,
        others: OtherRuns | None = None,
        command: str | None = None,
    ):
        """`command`: reruns a test whose name is appended, if it is not that of the options."""
        self._files = files
        self._options = options
        self._inventory = inventory
        self._others = others
        self._command = command
        self._ports = ExitStack()  # of NCCL's RAS
        self._port_of: dict[tuple[str | int, ...], int] = {}

    @property
    def loop(self) -> EventLoop:
        return self._files.loop

    def _address_of_ras(self, lease: Lease) -> dict[str, str]:
        """The address of NCCL's status: by default, all jobs of a machine would use the same port."""
        if not lease.devices:
            return {}
        place: tuple[str | int, ...] = (*lease.devices[:1], *lease.slots[:1])  # which only one unit has at a time
        if place not in self._port_of:
            self._port_of[place] = self._ports.enter_context(leased_port())
        return {"NCCL_RAS_ADDR": f"localhost:{self._port_of[place]}"}

    def start(self, unit: Unit, lease: Lease, listener: LostUnitListener) -> UnitHandle:
        return RunningUnit(
            unit,
            lease,
            self._files,
            Limits(self._options.timeout, self._options.slow),
            {
                **environment_of(lease, self._inventory),
                **self._address_of_ras(lease),
                **(self._others.environment_of(lease) if self._others is not None else {}),
                **self._options.environment_of_sanitizer(unit.repetition),
            },
            listener,
            self._options.command_of(unit.repetition, self._command),
            self._options.stream,
            self._others.locks_of(lease) if self._others is not None else (),
        )

    def close_file(self, name: str) -> None:
        self._files.file(name).close()

    def wait_for_more(self) -> bool:
        return False
