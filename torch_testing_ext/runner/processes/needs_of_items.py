"""The needs of a test that pytest has collected, by its marks and decorators."""

import pytest

from torch_testing_ext._machine.device_needs import DeviceNeeds
from torch_testing_ext._pytest_ranks.marks import SPEC
from torch_testing_ext._testing.bases.tests_for_pytest import PytestTest
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import TIMEOUT, WHOLE_WORLD
from torch_testing_ext.runner.model import Test, TestId


def describe(test: PytestTest, name: TestId, available: int) -> Test:
    """A test with its needs, by its marks and decorators. `available`: the number of devices of the run."""
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
        skip=_reason(skip) if skip is not None else None,
        marks=tuple(sorted({mark.name for mark in item.iter_markers()})),
        line=test.line,
    )


def _reason(mark: pytest.Mark) -> str:
    reason = mark.kwargs.get("reason")
    if not reason and mark.args:
        reason = mark.args[0]
    return str(reason or "unconditional skip")
