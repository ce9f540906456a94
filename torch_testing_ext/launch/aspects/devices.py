"""Accelerators of a test: leased, so that no other test and no other program has them at the same time.

Marked functions, `spawn` and `run_script` lease them here; torchtest leases for its tests. All use the same locks.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._process.declarations import Setting
from torch_testing_ext._process.setting_names import FAKE_DEVICES
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


FAKE: Setting[tuple[str, ...]] = Setting(FAKE_DEVICES, "numbers: 0,3", _names, ())


class Devices(Aspect):
    """Leases the accelerators of a test, and hides the others from its ranks."""

    name = "devices"
    gaps = MappingProxyType(
        {
            HostKind.FRESH: "torchtest leases for test classes; elsewhere their ranks see all devices",
            HostKind.OWN: "torchtest leases for test classes; elsewhere their ranks see all devices",
            HostKind.THREADS: "threads see what their process sees",
            HostKind.LAUNCHED: "the launcher has given each process its devices",
            HostKind.WORLD: "ranks that do not communicate run on the CPU",
        }
    )
    settings = (FAKE,)

    def equip(self, attempt: RankAttempt) -> None:
        need = attempt.plan.devices
        if not need.count and not need.are_hidden:
            return
        from torch_testing_ext.launch.device_leases import variables_of

        leased = variables_of(need, FAKE.value())
        attempt.environ.update(attempt.resources.enter_context(leased))


DEVICES = Devices()
