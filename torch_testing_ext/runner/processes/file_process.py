"""The process of one test file: it imports the file, lists its tests, and forks a nanny with a worker for each unit.

Or it says why it must not be forked, as it runs threads or has asked for an accelerator: its units are interpreters of
their own then.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext import launch
from torch_testing_ext._asserts import expectations
from torch_testing_ext._process import fork_safety, system
from torch_testing_ext._process.channel import Channel, Message
from torch_testing_ext.launch import starting
from torch_testing_ext.launch.rank import cut_off

from . import nanny, worker
from .fork_parent import ForkParent
from .loaded_file import LoadedFile
from .unit_spec import UnitSpec


def live(order: Message, channel: Channel) -> NoReturn:
    os.chdir(order["root"])
    cut_off(os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    system.adopt_orphans()
    fork_safety.mark_fork_safe()
    try:
        file = LoadedFile.load(order["path"])
    except BaseException as error:
        channel.send({"broken": _explain(error, order["path"])})
        os._exit(0)
    # Whoever is forked off this process has seen the file as it is now.
    expectations.history = Path(order["log"]).with_name(f"expected{os.getpid()}.json")
    # Nothing that lives now will be collected in a worker: keeps the collector from writing to shared pages.
    gc.collect()
    gc.freeze()
    unfit = _list(file, order, channel)
    channel.send({"ready": unfit})
    if unfit is None:
        FileProcess(channel, file, frozenset(system.children(os.getpid()))).serve()
    os._exit(0)


def _explain(error: BaseException, path: str) -> str:
    """The traceback from the file on: how we came to import it is nobody's concern."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename != path:
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb))
    said = f"the file called sys.exit({error.code!r}) while it was imported" if isinstance(error, SystemExit) else ""
    return f"{said or launch.summarize(error)}\n\n{text.rstrip()}"


def _list(file: LoadedFile, order: Message, channel: Channel) -> str | None:
    """Tell of all tests: by a child, since to ask a test for its world size may be to ask for accelerators.

    Returns why this process must not be forked, as the child and the time after its birth show; or None.
    """
    unfit = fork_safety.prepare_to_fork()
    pid = fork_safety.fork()
    if pid == 0:
        _tell_and_exit(file, order, channel)
    unfit = unfit or fork_safety.check_after_fork()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, _SPOILT):
        channel.send({"broken": f"to ask the tests for what they need ended the process that asked (code {code})"})
        os._exit(0)
    return unfit or ("it asks for an accelerator when it is imported" if code == _SPOILT else None)


_SPOILT = 3


def _tell_and_exit(file: LoadedFile, order: Message, channel: Channel) -> NoReturn:
    code = 1
    try:
        from torch_testing_ext import _torch
        from torch_testing_ext._machine import accelerators

        spoilt = _torch.accelerator_is_in_bad_fork() and accelerators.device_may_exist()
        channel.send({"tests": file.listing(order["file"], order["devices"])})
        code = _SPOILT if spoilt else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class FileProcess(ForkParent):
    def __init__(self, channel: Channel, file: LoadedFile, kept: frozenset[int]):
        super().__init__(channel, kept)
        self._file = file

    def obey(self, order: Message) -> None:
        if order["order"] == "unit":
            self._start(order)
        else:
            self._preload(order["modules"])

    def _preload(self, modules: list[str]) -> None:
        """At once: a worker that is born meanwhile would have to import them all by itself."""
        for name in modules:
            with suppress(Exception):
                importlib.import_module(name)
        if why := fork_safety.prepare_to_fork() or fork_safety.check_after_fork():
            self.channel.send({"unfit": f"what its tests import leaves a process unfit to be forked: {why}"})

    def _start(self, order: Message) -> None:
        unit = UnitSpec.of_data(order["unit"])
        nannys, workers = (Channel.on(fd) for fd in order["fds"])
        start = partial(worker.live, unit, lambda: self._file.tests, workers)
        self.fork(unit.number, partial(nanny.live, unit, nannys, workers, start))
        nannys.close()
        workers.close()


def start_interpreter(order: UnitSpec, channel: Channel) -> Callable[[int], Any]:
    """The life of a worker that imports its file by itself."""

    def start(log: int) -> NoReturn:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.set_inheritable(channel.fileno(), True)
        words = starting.command("runner.processes.worker", sys.path, str(order.save()), str(channel.fileno()))
        os.execve(sys.executable, words, {**os.environ, **order.environ})

    return start
