"""Fake accelerators: devices that the CPU emulates, for a machine that has none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from torch_testing_ext._machine.fake_accelerator import COUNT, LATE_STREAMS, MEMORY
from torch_testing_ext._process.declarations import AskedOptions, CannotBegin, Option, Setting, either
from torch_testing_ext._process.setting_readers import count
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

ACCELERATORS = Option(
    "fake_accelerators",
    "resources",
    count,
    "emulate N accelerators on the CPU",
    "N",
    kind=int | None,
    pytest_help="emulate N accelerators on the CPU",
    apart={"cluster": "the nodes have the accelerators"},
)


class FakeAccelerators(Aspect):
    """Gives fake accelerators to the processes of a run."""

    name = "fake accelerators"
    is_always_on = False
    gaps = MappingProxyType(
        {
            HostKind.WORLD: "ranks that do not communicate run on the CPU",
        }
    )
    options = (ACCELERATORS,)
    # `starting` and the library read them.
    settings = (
        Setting(COUNT, "a number", count, 0),
        Setting(MEMORY, "a number of bytes", count, 0),
        Setting(LATE_STREAMS, "0 or 1", either("0", "1"), False),
    )

    def begin(self, asked: AskedOptions, runs_tests: bool) -> None:
        number = asked.value(ACCELERATORS)
        if number is None:
            return
        from torch_testing_ext._machine.fake_accelerator import building, starting

        try:
            starting.read_count(str(number))
        except building.FakeAcceleratorError as error:
            raise ValueError(f"{ACCELERATORS.flag}: {error}") from None
        try:
            (starting.start_here if runs_tests else starting.start)(number)
        except building.FakeAcceleratorError as error:
            raise CannotBegin(f"{ACCELERATORS.flag}: {error}") from None

    def header(self, asked: AskedOptions) -> str:
        from torch_testing_ext._machine import fake_accelerator

        number = os.environ.get(COUNT)
        return fake_accelerator.describe(int(number)) if number else ""

    def facts(self, asked: AskedOptions) -> Mapping[str, str]:
        number = os.environ.get(COUNT)
        return {"fake_accelerators": number} if number else {}


FAKE_ACCELERATORS = FakeAccelerators()
