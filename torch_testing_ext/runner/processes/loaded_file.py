"""An imported test file: its tests and their needs. Used only in processes that may import torch."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import unittest
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model import Test, TestId

_FIXTURES = ("setUpClass", "tearDownClass")
_MODULE_FIXTURES = ("setUpModule", "tearDownModule")


@dataclass(frozen=True)
class LoadedFile:
    """The tests of an imported file."""

    tests: dict[str, unittest.TestCase]  # by `Class.test_x`, in unittest's order

    __test__ = False

    @classmethod
    def load(cls, path: str) -> LoadedFile:
        """Import the file with sys.path and sys.argv as if it was run as a program."""
        sys.path.insert(0, os.path.dirname(path))
        sys.argv[:] = [path]
        module = _import(path)
        return cls({name_of(test): test for test in flatten(unittest.TestLoader().loadTestsFromModule(module))})

    def listing(self, file: str, devices: int) -> tuple[Test, ...]:
        """All tests and their needs. `devices`: the number of devices of the run."""
        return tuple(describe(test, file, devices) for test in self.tests.values())


def _import(path: str) -> Any:
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def flatten(suite: Any) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        yield suite
        return
    for part in suite:
        yield from flatten(part)


def name_of(test: unittest.TestCase) -> str:
    return f"{type(test).__qualname__}.{test._testMethodName}"


def describe(test: unittest.TestCase, file: str, devices: int) -> Test:
    cls, method = type(test), test._testMethodName
    needs = _needs_of(test)
    ranks = _world_size(test, needs)
    return Test(
        id=TestId(file, cls.__qualname__, method),
        world_size=ranks,
        devices=_devices(test, needs, ranks, devices),
        backend=next((need.backend for need in needs if need.backend), None),
        timeout=_timeout(test),
        together=_together(cls),
        skip=_known_skip(test),
        line=_line(cls, method),
    )


def _needs_of(test: unittest.TestCase) -> tuple[Any, ...]:
    from torch_testing_ext._marks.needs import needs_of

    return needs_of(getattr(test, test._testMethodName))


def _world_size(test: Any, needs: tuple[Any, ...]) -> int:
    """The number of processes that compute at once. If reading world_size raises, the test raises when it runs."""
    try:
        return max(1, int(test.world_size))
    except Exception:
        return max((need.world_size for need in needs if need.world_size), default=1)


def _devices(test: Any, needs: tuple[Any, ...], ranks: int, available: int) -> int:
    """The number of accelerators that the test will use on a machine that has `available`.

    The number that it declares, and at least one per rank if there are enough: a test without a declaration may use
    accelerators, and must not find those of another test.
    """
    declared = min(_declared(needs, available), available)
    # More than there are: the test would certainly skip.
    declared = max(declared, _declared(_certain_needs_of(test), available))
    on_cpu = getattr(test, "device_type", None) == "cpu"
    return max(declared, ranks if ranks <= available and not on_cpu else 0)


def _declared(needs: Iterable[Any], available: int) -> int:
    return max((need.devices for need in needs if not (need.allow_cpu and available == 0)), default=0)


def _certain_needs_of(test: Any) -> tuple[Any, ...]:
    """The needs for want of which the test skips, whatever its class overrides and other decorators do."""
    from torch_testing_ext._cases.ranked import RankedTestCase
    from torch_testing_ext._marks.needs import certain_needs

    if isinstance(test, RankedTestCase) and test._decides_about_skips():
        return ()
    return tuple(certain_needs(getattr(test, test._testMethodName)))


def _timeout(test: Any) -> float | None:
    from torch_testing_ext._cases import ranked
    from torch_testing_ext._marks.timeouts import timeout_of

    overrides = ranked.TIMEOUT_OVERRIDE if isinstance(test, ranked.RankedTestCase) else {}
    return timeout_of(test) or overrides.get(test._testMethodName)


def _together(cls: type) -> str:
    """The name of the class or module whose fixtures keep its tests in one process; "" if there are none."""
    if any(hasattr(sys.modules.get(cls.__module__), name) for name in _MODULE_FIXTURES):
        return cls.__module__
    own = any(getattr(cls, name).__func__ is not getattr(unittest.TestCase, name).__func__ for name in _FIXTURES)
    return cls.__qualname__ if own else ""


def _known_skip(test: unittest.TestCase) -> str | None:
    for marked in (type(test), getattr(test, test._testMethodName)):
        if getattr(marked, "__unittest_skip__", False):
            return getattr(marked, "__unittest_skip_why__", "") or "skipped"
    return None


def _line(cls: type, method: str) -> int:
    code = getattr(inspect.unwrap(getattr(cls, method, None) or (lambda: None)), "__code__", None)
    return code.co_firstlineno if code else 0
