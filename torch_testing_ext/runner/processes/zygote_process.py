"""The zygote: the process that imports torch once for a whole run and forks a process for each test file."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from torch_testing_ext._process import child, fork_safety, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.messages import unexpected

from . import file_process, nanny
from .fork_parent import ForkParent
from .worker_messages import (
    CountDevices,
    DevicesCounted,
    Kill,
    Nothing,
    OpenFile,
    StartUnit,
    ToFile,
    ToZygote,
    ZygoteReady,
)


def main() -> NoReturn:
    """`python -c "... main()" CHANNEL PARENT DIRECTORY DROP_IN COLLAPSE MODULES...`; DROP_IN, COLLAPSE: 0 or 1."""
    parent, directory = int(sys.argv[2]), sys.argv[3]
    channel: Channel[ToZygote] = Channel.on(int(sys.argv[1]), ToZygote)
    child.start_session(parent, signal.SIGTERM)
    system.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[4] == "1":
        from torch_testing_ext.upstream import drop_in

        drop_in.install()
    ZygoteProcess(channel, _warm_up(sys.argv[6:], sys.argv[5] == "1")).serve()
    # A client that was killed has not removed it. Without a check: getppid() shows that death only after a moment.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _warm_up(modules: Iterable[str], collapse: bool) -> str | None:
    """Import modules that the test files will need. Returns the reason if this process is not safe to fork, or None."""
    for name in modules:
        with suppress(Exception):  # a file that needs the module will report the error
            importlib.import_module(name)
    from torch_testing_ext import _torch
    from torch_testing_ext._machine import seeds

    seeds.prepare_to_seed()
    _torch.process_state.exempt_imported(garbage=2)
    unsafe = fork_safety.prepare_to_fork()
    if collapse and not unsafe:
        system.collapse_all()
    return unsafe


class ZygoteProcess(ForkParent[ToZygote]):
    """Serves the requests of run_test.py."""

    def __init__(self, channel: Channel[ToZygote], unsafe: str | None):
        super().__init__(channel)
        channel.send(ZygoteReady(unsafe))

    def on_message(self, message: ToZygote) -> None:
        match message:
            case OpenFile(fds=(fd,)):
                to_file: Channel[ToFile] = Channel.on(fd, ToFile)
                self._fork_with(message.number, to_file, partial(file_process.run_and_exit, message, to_file))
            case CountDevices(fds=(fd,)):
                to_counter: Channel[Nothing] = Channel.on(fd, Nothing)
                self._fork_with(message.number, to_counter, partial(_count_devices, to_counter))
            case StartUnit():
                self._start_unit(message)
            case OpenFile() | CountDevices():
                raise AssertionError(f"{message} has no descriptor for its channel")
            case Kill():
                raise AssertionError("Kill is carried out by ForkParent")
            case _:
                unexpected(message)

    def _fork_with(self, number: int, theirs: Channel[ToFile] | Channel[Nothing], run: Callable[[], NoReturn]) -> None:
        self.fork(number, run)
        theirs.close()

    def _start_unit(self, message: StartUnit) -> None:
        """Start a unit whose file is not safe to fork."""
        try:
            self.fork(message.number, partial(nanny.run_and_exit, message, file_process.start_interpreter))
        finally:
            for fd in message.fds:
                os.close(fd)


def _count_devices(channel: Channel[Nothing]) -> NoReturn:
    """Count accelerators, in a separate process: one that has queried them is not safe to fork."""
    import torch

    from torch_testing_ext import _torch
    from torch_testing_ext._machine import accelerators
    from torch_testing_ext._machine.device_facts import facts_from

    fork_safety.mark_fork_safe()
    try:
        kind, count = accelerators.runtime(), accelerators.device_count()
    except accelerators.DriverDoesNotAnswer as error:
        channel.send(DevicesCounted(None, 0, failure=str(error)))
        os._exit(0)
    uuids = tuple(accelerators.ask_uuids()) if count else ()
    facts = facts_from(accelerators.ask_facts()) if count else ()
    channel.send(
        DevicesCounted(kind, count, torch.__version__, uuids, facts, _torch.cuda_state.nccl_version() if count else ())
    )
    os._exit(0)
