"""The process that imports torch once for a whole run. It forks a process for each test file, and runs no test."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from torch_testing_ext._process import fork_safety, system
from torch_testing_ext._process.channel import Channel, Message

from . import file_process, nanny
from .fork_parent import ForkParent
from .unit_spec import UnitSpec


def main() -> NoReturn:
    """`python -c "... main()" CHANNEL PARENT DIRECTORY DROP_IN MODULES...`; DROP_IN is 0 or 1."""
    channel, parent, directory = Channel.on(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    system.die_with(parent, signal.SIGTERM)
    system.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[4] == "1":
        from torch_testing_ext.upstream import drop_in

        drop_in.install()
    ZygoteProcess(channel, _warm_up(sys.argv[5:])).serve()
    # Who is killed removes nothing; and that he is gone shows in getppid() only a moment after he hung up.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _warm_up(modules: Iterable[str]) -> str | None:
    """Import what the test files will. Returns why this process must not be forked, or None."""
    for name in modules:
        with suppress(Exception):  # the file that needs it will tell, or do without
            importlib.import_module(name)
    from torch_testing_ext import _torch

    _torch.warm_up()
    gc.collect()
    gc.freeze()
    unfit = fork_safety.prepare_to_fork()
    for region in () if unfit else system.memory_regions():
        system.collapse(*region)
    return unfit


class ZygoteProcess(ForkParent):
    def __init__(self, channel: Channel, unfit: str | None):
        super().__init__(channel)
        channel.send({"ready": unfit})

    def obey(self, order: Message) -> None:
        match order["order"]:
            case "open":
                self._fork_with(order, lambda channel: file_process.live(order, channel))
            case "count":
                self._fork_with(order, _count_devices)
            case "unit":
                self._start_unit(order)

    def _fork_with(self, order: Message, live: Callable[[Channel], NoReturn]) -> None:
        (fd,) = order["fds"]
        theirs = Channel.on(fd)
        self.fork(order["number"], partial(live, theirs))
        theirs.close()

    def _start_unit(self, order: Message) -> None:
        """A unit whose file must not be forked."""
        unit = UnitSpec.of_data(order["unit"])
        nannys, workers = (Channel.on(fd) for fd in order["fds"])
        start = file_process.start_interpreter(unit, workers)
        self.fork(order["number"], partial(nanny.live, unit, nannys, workers, start))
        nannys.close()
        workers.close()


def _count_devices(channel: Channel) -> NoReturn:
    """In a process of its own: who has asked for accelerators must not be forked."""
    import torch

    from torch_testing_ext._machine import accelerators

    fork_safety.mark_fork_safe()
    kind, count = accelerators.accelerator_type(), accelerators.device_count()
    hip = kind == "cuda" and torch.version.hip is not None
    channel.send({"kind": "hip" if hip else kind, "count": count})
    os._exit(0)
