"""The process in which a unit's tests run, from its first instruction to its exit."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext import launch
from torch_testing_ext._marks.timeouts import ATTRIBUTE as TIMEOUT
from torch_testing_ext._process import fork_safety, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext.launch import client
from torch_testing_ext.launch.rank import cut_off

from .result import ReportingResult
from .unit_spec import UnitSpec

Tests = Mapping[str, unittest.TestCase]  # by `Class.test_x`


def live(order: UnitSpec, find: Callable[[], Tests], channel: Channel, log: int) -> NoReturn:
    """The whole life of a forked worker: `find` gives the tests of its file."""
    code = 1
    try:
        _settle_in(order, log)
        code = run(order, find(), channel)
    except BaseException as error:
        _tell_of_trouble(channel, error)
    finally:
        _leave(code)


def main() -> NoReturn:
    """The life of a worker that is a new interpreter: `python -c "... main()" ORDER CHANNEL`."""
    from .loaded_file import LoadedFile

    order, channel = UnitSpec.load(Path(sys.argv[1])), Channel.on(int(sys.argv[2]))
    live(order, lambda: LoadedFile.load(order.file).tests, channel, os.dup(1))


def _settle_in(order: UnitSpec, log: int) -> None:
    os.chdir(order.root)
    cut_off(log)
    os.environ.update(order.environ)
    _show_stacks(order.stacks)
    client.work_in(order.session)
    fork_safety.mark_fork_safe()  # its parents were looked at before they forked it
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _show_stacks(path: Path) -> None:
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.enable(file=stacks)
    faulthandler.register(system.DUMP_STACKS, file=stacks, all_threads=True)


def run(order: UnitSpec, found: Tests, channel: Channel) -> int:
    """Run the unit's tests; tells of each. What is missing is told too: nothing is passed over."""
    missing = [number for number, name in enumerate(order.tests) if name not in found]
    for number in missing:
        channel.send({"missing": number})
    tests = {name: found[name] for name in order.tests if name in found}
    numbers = {found[name].id(): number for number, name in enumerate(order.tests) if name in found}
    for name, seconds in zip(order.tests, order.timeouts, strict=True):
        if name in tests:
            setattr(tests[name], TIMEOUT, seconds)
    had = len(sys.modules)
    _run_suite(unittest.TestSuite(tests.values()), ReportingResult(order, numbers, channel.send))
    imported = [name for name in itertools.islice(sys.modules, had, None) if name.startswith("torch.")]
    if learnt := [*dict.fromkeys([*imported, *client.preload_hints])]:
        channel.send({"learnt": learnt})
    return 0


def _run_suite(suite: unittest.TestSuite, result: unittest.TestResult) -> None:
    """Where stacks begin that are shown: see launch/hang.py."""
    suite(result)


def _tell_of_trouble(channel: Channel, error: BaseException) -> None:
    """An exception that unittest let through: KeyboardInterrupt, or one of ours."""
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):
        channel.send({"broke": f"{launch.summarize(error)}\n\n{text}", "at": time.monotonic()})


def _leave(code: int) -> NoReturn:
    """Exit at once: no atexit, no threads to join, no destructors of groups that wait for peers."""
    with suppress(Exception):
        client.close()
    with suppress(Exception):
        _end_compile_workers()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _end_compile_workers() -> None:
    room: Any = sys.modules.get("torch_testing_ext._torch")
    if room is not None:
        room.end_compile_workers()
