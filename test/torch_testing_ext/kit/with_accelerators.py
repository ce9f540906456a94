"""Tests on a machine with accelerators of Python (`python_accelerator/`): each runs in a process that is forked for it.

No compiler and no new interpreter is needed. `environ_of_accelerators` has the variables with which a program that a
test runs sees such devices.
"""

import functools
import importlib
import os
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.device_locks import LEASE_FOLDER
from torch_testing_ext._process import ends, fork_safety
from torch_testing_ext._torch.devices import first_accelerator_use

from .processes import ROOT

FOLDER = Path(__file__).resolve().parent / "python_accelerator"
KIND = "testacc"
MASK = "TESTACC_VISIBLE_DEVICES"


def environ_of_accelerators(count: int, **more: str) -> dict[str, str]:
    """The variables that give accelerators to a new interpreter, which imports this tree."""
    path = os.pathsep.join([str(FOLDER), str(ROOT)])
    return {"PYTHONPATH": path, "TESTACC_COUNT": str(count), **more}


def register() -> None:
    """Give torch the accelerators in this process, which the environment counts. Only in a process of its own."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    importlib.import_module("python_accelerator").register()


@contextmanager
def have_accelerators(count: int, **environ: str) -> Iterator[None]:
    """A context in which there are so many accelerators, in a process that has registered them."""
    accelerators._answer.cache_clear()
    with mock.patch.dict(os.environ, {"TESTACC_COUNT": str(count), **environ}):
        yield
    accelerators._answer.cache_clear()


def with_accelerators(count: int = 0, **environ: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: run a test in a forked process in which torch has accelerators. A failure there fails the test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_child(self: unittest.TestCase) -> None:
            with have_accelerators(count, **environ):
                register()
                test(self)

        return in_a_fork(in_child)

    return decorate


def in_a_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator: run a test in a process that is forked for it, and that it may change for good."""

    @functools.wraps(test)
    def in_parent(self: unittest.TestCase) -> None:
        receive, send = os.pipe()
        pid = fork_safety.fork()
        if pid == 0:
            _run_and_exit(functools.partial(test, self), send)
        os.close(send)
        with os.fdopen(receive, encoding="utf-8") as pipe:
            text = pipe.read()
        code = ends.wait_for_exit(pid)
        if code or text:
            self.fail(text or f"the process of the test ended with code {code}")

    return in_parent


def _forget_earlier_uses() -> None:
    """In a fork: what this worker has done with devices does not count. It has none.

    The import of a suite that compiles asks CUDA's driver, if torch is built for it. Another test has ended the noting.
    """
    torch.cuda._is_in_bad_fork = lambda: False
    first_accelerator_use._noted = None
    first_accelerator_use.note_first_use()


def _run_and_exit(test: Callable[[], None], send: int) -> None:
    code = 1
    _forget_earlier_uses()
    try:
        test()
        code = 0
    except BaseException:
        with os.fdopen(send, "w", encoding="utf-8") as pipe:
            pipe.write(traceback.format_exc())
    finally:
        os._exit(code)


def use_own_leases(case: unittest.TestCase) -> None:
    """Give a test a folder of locks of its own, in which nobody else has leased a device."""
    folder = tempfile.TemporaryDirectory()
    case.addCleanup(folder.cleanup)
    environ = mock.patch.dict(os.environ, {LEASE_FOLDER: folder.name})
    environ.start()
    case.addCleanup(environ.stop)
