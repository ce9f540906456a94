"""The protocol of leases, of one machine or of several nodes, for the queue, the engine and the forecast."""

from __future__ import annotations

from typing import Protocol

from torch_testing_ext.runner.model import Lease, Unit

from .leases import Size


class RunLeases(Protocol):
    """The devices and CPU slots of a run. Nothing is handed out twice at the same time."""

    @property
    def devices(self) -> Size:
        """The sizes of units by devices."""

    @property
    def slots(self) -> Size:
        """The sizes of units by CPU slots."""

    @property
    def free_devices(self) -> int:
        """The devices that are free now."""

    @property
    def free_slots(self) -> int:
        """The CPU slots that are free now."""

    def may_fit(self, unit: Unit) -> bool:
        """Whether the unit fits when nothing else runs."""

    def fits(self, unit: Unit) -> bool:
        """Whether the unit fits now."""

    def may_run_now(self, unit: Unit) -> bool:
        """Whether the unit may run beside those that run now: one that runs alone may not."""

    def reserve(self, unit: Unit) -> bool:
        """Keep for the unit what becomes free. Returns whether that helps it."""

    def take(self, unit: Unit) -> Lease:
        """Lease what the unit needs, which fits."""

    def give_back(self, lease: Lease) -> None:
        """End a lease."""
