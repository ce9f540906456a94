"""The process of one test file: it imports the file, lists its tests, and forks a nanny with a worker for each unit.

If the process is not safe to fork, because it runs threads or has queried an accelerator, it reports that, and its
units become new interpreters.
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
from typing import NoReturn

from torch_testing_ext import launch
from torch_testing_ext._asserts import expectations
from torch_testing_ext._process import child, fork_safety, interpreter, reaping, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.messages import unexpected

from . import nanny, worker
from .fork_parent import ForkParent, close_all
from .loaded_file import FileSkips, LoadedFile, how_to_import
from .protocol import (
    FileBroken,
    FileReady,
    FileSkipped,
    FileTests,
    FileUnsafe,
    Kill,
    Nothing,
    OpenFile,
    PreloadModules,
    StartUnit,
    ToFile,
    ToNanny,
)
from .unit_spec import UnitSpec

# The exit code of a child that has queried accelerators while it listed the tests.
_QUERIED_ACCELERATORS = 3


def run_and_exit(request: OpenFile, channel: Channel[ToFile]) -> NoReturn:
    """Run the process and exit."""
    os.chdir(request.root)
    child.detach(os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    system.adopt_orphans()
    fork_safety.mark_fork_safe()
    try:
        file = LoadedFile.load(request.path)
    except FileSkips as skip:
        channel.send(FileSkipped(skip.reason, skip.want))
        os._exit(0)
    except BaseException as error:
        channel.send(FileBroken(_explain(error, request.path)))
        os._exit(0)
    # Every process forked from this one has read the file as it is now.
    expectations.history = Path(request.log).with_name(f"expected{os.getpid()}.json")
    # Exempt everything that exists now from collection, so that a worker's collector does not write to shared pages.
    gc.collect()
    gc.freeze()
    unsafe = _list_tests(file, request, channel)
    channel.send(FileReady(unsafe))
    if unsafe is None:
        FileProcess(channel, file, frozenset(system.children(os.getpid()))).serve()
    os._exit(0)


def _explain(error: BaseException, path: str) -> str:
    """The error with its traceback, which begins in the test file or in its package: the import itself is left out."""
    tb = error.__traceback__
    while tb is not None and not _is_of_tests(tb.tb_frame.f_code.co_filename, path):
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb))
    exited = f"the file called sys.exit({error.code!r}) while it was imported" if isinstance(error, SystemExit) else ""
    parts = (exited or launch.summarize(error), how_to_import(error, path), text.rstrip())
    return "\n\n".join(part for part in parts if part)


def _is_of_tests(filename: str, path: str) -> bool:
    return filename == path or (filename.endswith("__init__.py") and Path(path).is_relative_to(Path(filename).parent))


def _list_tests(file: LoadedFile, request: OpenFile, channel: Channel[ToFile]) -> str | None:
    """Send all tests, from a child: reading a test's world size may query accelerators.

    Returns the reason if this process is not safe to fork, as the child and its fork show; or None.
    """
    unsafe = fork_safety.prepare_to_fork()
    pid = fork_safety.fork()
    if pid == 0:
        _send_tests_and_exit(file, request, channel)
    unsafe = unsafe or fork_safety.check_after_fork()
    code = reaping.wait_for_exit(pid)
    if code not in (0, _QUERIED_ACCELERATORS):
        message = f"the process that listed the tests and their needs ended early (code {code})"
        channel.send(FileBroken(message))
        os._exit(0)
    return unsafe or ("it queries an accelerator when it is imported" if code == _QUERIED_ACCELERATORS else None)


def _send_tests_and_exit(file: LoadedFile, request: OpenFile, channel: Channel[ToFile]) -> NoReturn:
    code = 1
    try:
        from torch_testing_ext import _torch
        from torch_testing_ext._machine import accelerators

        queried = _torch.accelerator_is_in_bad_fork() and accelerators.device_may_exist()
        channel.send(FileTests(file.listing(request.file, request.devices), file.list_not_run(request.file)))
        code = _QUERIED_ACCELERATORS if queried else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class FileProcess(ForkParent[ToFile]):
    """Serves the units of one test file."""

    def __init__(self, channel: Channel[ToFile], file: LoadedFile, kept: frozenset[int]):
        super().__init__(channel, kept)
        self._file = file

    def on_message(self, message: ToFile) -> None:
        match message:
            case StartUnit():
                self._start(message)
            case PreloadModules(modules):
                self._preload(modules)
            case Kill():
                raise AssertionError("Kill is carried out by ForkParent")
            case _:
                unexpected(message)

    def _preload(self, modules: tuple[str, ...]) -> None:
        """Import modules at once: a worker forked before that would have to import them itself."""
        for name in modules:
            with suppress(Exception):
                importlib.import_module(name)
        if why := fork_safety.prepare_to_fork() or fork_safety.check_after_fork():
            self.channel.send(FileUnsafe(f"modules that its tests import leave a process unsafe to fork: {why}"))

    def _start(self, message: StartUnit) -> None:
        to_nanny, to_worker = unit_channels(message)
        start = partial(worker.run_and_exit, message.unit, lambda: self._file.tests, to_worker)
        self.fork(message.number, partial(nanny.run_and_exit, message.unit, to_nanny, to_worker, start))
        close_all(to_nanny, to_worker)


def unit_channels(message: StartUnit) -> tuple[Channel[ToNanny], Channel[Nothing]]:
    """The channels of a unit's nanny and of its worker."""
    nanny_fd, worker_fd = message.fds
    return Channel.on(nanny_fd, ToNanny), Channel.on(worker_fd, Nothing)


def start_interpreter(unit: UnitSpec, channel: Channel[Nothing]) -> Callable[[int], NoReturn]:
    """Turns a process into a new interpreter, whose worker imports its file itself."""

    def start(log: int) -> NoReturn:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.set_inheritable(channel.fileno(), True)
        words = interpreter.command("runner.processes.worker", sys.path, str(unit.save()), str(channel.fileno()))
        os.execve(sys.executable, words, {**os.environ, **unit.environ})

    return start
