"""The needs of a test: devices, ranks, time, and the tests that run in the same process."""

from __future__ import annotations

import inspect
import sys
import unittest
import unittest.util
from dataclasses import replace
from typing import Any

from torch_testing_ext._machine.device_needs import DeviceNeeds
from torch_testing_ext._testing.bases.tests_for_pytest import PytestTest
from torch_testing_ext.runner.model import Test, TestId

from .names_of_tests import NamedTest

_FIXTURES = ("setUpClass", "tearDownClass")
_MODULE_FIXTURES = ("setUpModule", "tearDownModule")
# Tests that use these with accelerators declare how many.
_CPU_BACKENDS = {"gloo", "mpi", "fake"}


def describe(named: NamedTest, file: str, devices: int) -> Test:
    """A test with its needs. `devices`: the number of devices of the run, on one node."""
    test = named.test
    if isinstance(test, PytestTest):
        return _describe_pytest(named, file, devices)
    from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
    from torch_testing_ext._testing.marks.needs import needs_of
    from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD

    method = _method(test)
    needs = needs_of(type(test))
    if method is not None:
        needs = (*needs_of(method), *needs)
    ranks = _world_size(test, needs)
    return Test(
        id=TestId(file, named.cls, named.method),
        world_size=ranks,
        in_one_process=_is_in_one_process(test),
        devices=_devices(test, needs, ranks, devices),
        of_devices=DeviceNeeds.of_all(need.of_devices for need in needs),
        backend=next((need.backend for need in needs if need.backend), None),
        timeout=_timeout(test),
        has_ranks=ranks > 1 or isinstance(test, RankedTestCase),
        is_whole_world=hasattr(method, WHOLE_WORLD),
        together=_together(type(test), named.cls),
        skip=_known_skip(test, method),
        line=_line(test),
    )


def _describe_pytest(named: NamedTest, file: str, devices: int) -> Test:
    """A test that pytest runs; if unittest would run it, too, both may say what it needs."""
    from . import pytest_items

    item = _describe_item(named.test, TestId(file, named.cls, named.method), devices)
    test_case = pytest_items.test_case(named.test.item)
    if test_case is None:
        return item
    case = describe(NamedTest(named.cls, named.method, test_case), file, devices)
    return replace(
        item,
        world_size=max(item.world_size, case.world_size),
        in_one_process=case.in_one_process,
        devices=max(item.devices, case.devices),
        of_devices=DeviceNeeds.of_all([item.of_devices, case.of_devices]),
        backend=item.backend or case.backend,
        timeout=item.timeout or case.timeout,
        has_ranks=item.has_ranks or case.has_ranks,
        is_whole_world=item.is_whole_world or case.is_whole_world,
        skip=case.skip if item.skip is None else item.skip,
        line=case.line or item.line,
    )


def _describe_item(test: PytestTest, name: TestId, available: int) -> Test:
    """A test by its marks and decorators alone."""
    from torch_testing_ext._pytest_ranks.marks import SPEC
    from torch_testing_ext._testing.marks import needs
    from torch_testing_ext._testing.marks.settings_of_tests import TIMEOUT, WHOLE_WORLD

    item = test.item
    function = getattr(item, "function", None)
    cls = getattr(item, "cls", None)
    declared = [*needs.needs_of(function), *needs.needs_of(cls)]
    devices = needs.declared(declared, available)
    timeout = getattr(function, TIMEOUT, None) or getattr(cls, TIMEOUT, None)
    world_size = 1
    backend = None
    spec = item.stash.get(SPEC, None)
    if spec is not None:
        world_size = spec.world_size
        devices = max(devices, spec.on(available).devices)
        backend = spec.backend
        timeout = spec.timeout or timeout or item.config.getoption("rank_timeout", None)
    if item.get_closest_marker("layouts") is not None:
        from torch_testing_ext._pytest_ranks import layouts_of_tests

        world_size = layouts_of_tests.most_ranks_of(item)
    skip = item.get_closest_marker("skip")
    return Test(
        name,
        world_size=world_size,
        devices=devices,
        of_devices=DeviceNeeds.of_all(need.of_devices for need in declared),
        backend=backend,
        timeout=timeout,
        has_ranks=spec is not None or world_size > 1,
        is_whole_world=hasattr(function, WHOLE_WORLD),
        together=test.together,
        skip=_reason_of(skip) if skip is not None else None,
        marks=tuple(sorted({mark.name for mark in item.iter_markers()})),
        line=test.line,
    )


def _reason_of(mark: Any) -> str:
    reason = mark.kwargs.get("reason")
    if not reason and mark.args:
        reason = mark.args[0]
    return str(reason or "unconditional skip")


def _method(test: Any) -> Any:
    return getattr(test, getattr(test, "_testMethodName", ""), None)


def _world_size(test: Any, needs: tuple[Any, ...]) -> int:
    """The number of ranks that compute at once. If reading world_size raises, the test raises when it runs."""
    try:
        size = int(test.world_size)
        if size > 0:
            return size
        # One for each device.
        return max((need.world_size or need.devices for need in needs), default=1) or 1
    except Exception:
        return max((need.world_size for need in needs if need.world_size), default=1)


def _is_in_one_process(test: Any) -> bool:
    """Whether its ranks are threads, of which mostly one computes, or local tensors."""
    from torch_testing_ext._testing.bases.multi_threaded import MultiThreadedTestCase

    return isinstance(test, MultiThreadedTestCase) or bool(getattr(test, "is_local_tensor_enabled", False))


def _devices(test: Any, needs: tuple[Any, ...], ranks: int, available: int) -> int:
    """The number of accelerators that the test will use on a machine that has `available`.

    The number that it declares; and at least one per rank, if there are enough and it may use some without a
    declaration: it must not find those of another test.
    """
    from torch_testing_ext._testing.marks.needs import declared

    used = declared(needs, available)
    if not any(need.devices for need in needs):
        # PyTorch's own decorators leave this.
        marked = int(getattr(_method(test), "_min_gpus_required", 0) or 0)
        used = max(used, marked)
    # More than there are: the test would certainly skip.
    used = max(min(used, available), declared(_certain_needs_of(test), available))
    if ranks <= available and _may_use_accelerators(test, needs):
        used = max(used, ranks)
    return used


def _may_use_accelerators(test: Any, needs: tuple[Any, ...]) -> bool:
    """Whether a test may use accelerators although no decorator says how many."""
    from torch_testing_ext._testing.bases import ranked_test_case
    from torch_testing_ext.upstream import drop_in

    device_type = _device_type(test)
    if device_type:
        return device_type != "cpu"
    backends = {need.backend for need in needs if need.backend}
    if backends:
        return not backends <= _CPU_BACKENDS
    # PyTorch's tests in one process use accelerators without a declaration that could be read here.
    return isinstance(test, ranked_test_case.RankedTestCase) or drop_in.is_installed()


def _device_type(test: Any) -> str:
    """The type of device that the test's class names, as PyTorch's device-generic tests do; "" if it names none."""
    try:
        device = getattr(test, "device_type", None)
        if callable(device):
            device = device()
    except Exception:
        return ""
    return str(device or "").partition(":")[0]


def _certain_needs_of(test: Any) -> tuple[Any, ...]:
    """The needs without which the test skips, whatever its class overrides and other decorators do."""
    from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
    from torch_testing_ext._testing.marks.needs import certain_needs

    if isinstance(test, RankedTestCase) and test._decides_about_skips():
        return ()
    method = _method(test)
    return () if method is None else tuple(certain_needs(method))


def _timeout(test: Any) -> float | None:
    from torch_testing_ext._testing.bases import ranked_test_case
    from torch_testing_ext._testing.marks.settings_of_tests import timeout_of

    if not isinstance(test, unittest.TestCase):
        return None
    overrides = ranked_test_case.TIMEOUT_OVERRIDE if isinstance(test, ranked_test_case.RankedTestCase) else {}
    return timeout_of(test) or overrides.get(test._testMethodName)


def _together(cls: type, name: str) -> str:
    """The name of the class or module whose fixtures keep its tests in one process; "" if there are none."""
    module = sys.modules.get(cls.__module__)
    if any(hasattr(module, fixture) for fixture in _MODULE_FIXTURES):
        return cls.__module__
    for fixture in _FIXTURES:
        if _function(cls, fixture) is not _function(unittest.TestCase, fixture):
            return name
    return ""


def _function(cls: type, name: str) -> Any:
    """A fixture's function; that of TestCase for a class without one."""
    fixture = getattr(cls, name, getattr(unittest.TestCase, name))
    return getattr(fixture, "__func__", fixture)


def _known_skip(test: Any, method: Any) -> str | None:
    for marked in (type(test), method):
        if getattr(marked, "__unittest_skip__", False):
            return getattr(marked, "__unittest_skip_why__", "") or "skipped"
    return None


def _line(test: Any) -> int:
    method = getattr(type(test), getattr(test, "_testMethodName", ""), None)
    if not method:
        return 0
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code.co_firstlineno if code else 0
