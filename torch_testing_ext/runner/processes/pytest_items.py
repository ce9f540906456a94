"""The tests that pytest has collected in a file: which of them it runs, what they need, and which share fixtures."""

import importlib
import unittest
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext._machine.device_needs import DeviceNeeds
from torch_testing_ext._pytest_ranks import marks
from torch_testing_ext._pytest_ranks.marks import SPEC
from torch_testing_ext._pytest_ranks.pytest_internals import (
    UNITTEST_FIXTURE,
    XUNIT_FIXTURES,
    fixture_definitions,
    is_of_unittest,
    name_in_file,
)
from torch_testing_ext._testing.bases import tests_for_pytest
from torch_testing_ext._testing.bases.tests_for_pytest import PytestStyleTest, PytestTest
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import TIMEOUT, WHOLE_WORLD
from torch_testing_ext.runner.model import Test, TestId

from .pytest_collection import Collection, names_of_classes


def share_out(
    collection: Collection, tests: list[Any], styled: list[PytestStyleTest]
) -> tuple[list[Any], list[tuple[Any, str]], tuple[str, ...]]:
    """Each test is run by unittest or pytest, or cannot be collected, or is left out by pytest's options and hooks.

    Returns the tests that unittest runs, before those that pytest runs; those that are not run, and why; and the names
    of those left out.
    """
    by_pytest = list(_tests_for_pytest(collection, tests))
    moved = {_identity(test.case) for test in by_pytest if test.case is not None}
    deselected = set()
    others_deselected = []
    for item in collection.deselected:
        if is_of_unittest(item):
            deselected.add((item.cls, _function_name(item)))
        else:
            others_deselected.append(item)
    left_out = _names_of(others_deselected)
    by_unittest: list[Any] = []
    missed: list[Any] = []
    for test in tests:
        if _identity(test) in moved:
            continue
        if not tests_for_pytest.has_marks(test):
            by_unittest.append(test)
        elif _identity(test) in deselected:
            left_out.append(f"{type(test).__name__}.{test._testMethodName}")
        else:
            missed.append(test)
    collected = {*left_out, *_names_of(collection.items)}
    for styled_test in styled:
        name = f"{styled_test.cls}.{styled_test.method}".lstrip(".")
        if name in collected:
            continue
        if collection.failures:
            missed.append(styled_test)
        else:
            left_out.append(name)
    return [*by_unittest, *by_pytest], _not_collected(collection, missed), tuple(left_out)


def _identity(test: Any) -> tuple[type, str]:
    return type(test), getattr(test, "_testMethodName", "")


def _not_collected(collection: Collection, missed: list[Any]) -> list[tuple[Any, str]]:
    """An error for each test that pytest could not collect, and for each failure that concerns none of these."""
    title = "not run: pytest cannot collect it"
    if missed:
        why = "\n\n".join(text for _, text in collection.failures)
        if not why:
            why = "it does not find it, but only pytest heeds its marks"
        return [(test, f"{title}: {why}") for test in missed]
    errors = []
    for names, text in collection.failures:
        *classes, name = names or ("",)
        test = PytestStyleTest(".".join(classes), name, 0)
        errors.append((test, f"{title}: {text}"))
    return errors


def _tests_for_pytest(collection: Collection, by_unittest: Iterable[Any]) -> Iterator[PytestTest]:
    """The tests that pytest runs: all that unittest does not find, and those of unittest that have marks of pytest."""
    cases = {_identity(test): test for test in by_unittest}
    items = collection.items
    for item in items:
        # What is wrong with them is said when they run.
        marks.read_marks(item)
    if any(SPEC in item.stash for item in items):
        # Once, and not in each worker.
        importlib.import_module("torch_testing_ext._pytest_ranks.item_in_parent")
    plugins = _packages_of_plugins(items[0].config) if items else frozenset()
    together = _together(items, plugins)
    for number, item in enumerate(items):
        case = None
        if is_of_unittest(item):
            case = cases.get((item.cls, _function_name(item)))
            if case is None or not _is_for_pytest(item, plugins):
                continue
        cls = "::".join(names_of_classes(item))
        line = (item.location[1] or 0) + 1
        yield PytestTest(collection, item, cls, item.name, line, together.get(number, ""), case)


def _is_for_pytest(item: Any, plugins: frozenset[str]) -> bool:
    """Whether a test of unittest has what only pytest heeds: marks, or fixtures of the project that it uses."""
    if any(True for _ in item.iter_markers()):
        return True
    for definitions in fixture_definitions(item).values():
        for definition in definitions:
            if not _is_xunit(definition) and not _is_of(definition, plugins):
                return True
    return False


def _names_of(items: Iterable[Any]) -> list[str]:
    """Names of tests without their parameters, each once."""
    names: dict[str, None] = {}
    for item in items:
        parts = [*names_of_classes(item), _function_name(item)]
        names[".".join(parts)] = None
    return list(names)


def _function_name(item: Any) -> str:
    """Without the names of its parameters."""
    return str(getattr(item, "originalname", None) or item.name)


# -- needs


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
    skip = item.get_closest_marker("skip")
    return Test(
        name,
        world_size=world_size,
        devices=devices,
        of_devices=DeviceNeeds.of_all(need.of_devices for need in declared),
        backend=backend,
        timeout=timeout,
        has_ranks=spec is not None,
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


# -- fixtures that tests share


# The definition of a fixture; the class whose tests share it, "" for the whole file.
_Key = tuple[Any, str]


@dataclass(eq=False)
class _Group:
    """Tests that share fixtures, by their numbers."""

    keys: set[_Key]
    numbers: list[int]


def _together(items: list[Any], plugins: frozenset[str]) -> dict[int, str]:
    """Name the fixtures that tests share, by the number of each test: those with one name run in one process."""
    groups: list[_Group] = []
    group_of: dict[_Key, _Group] = {}
    for number, item in enumerate(items):
        keys = set(_shared_fixtures(item, plugins))
        if not keys:
            continue
        merged = _Group(keys, [number])
        # Groups that the test has a fixture of each with become one.
        met = {id(group_of[key]): group_of[key] for key in keys if key in group_of}
        for group in met.values():
            merged.keys |= group.keys
            merged.numbers = [*group.numbers, *merged.numbers]
            groups.remove(group)
        groups.append(merged)
        group_of.update(dict.fromkeys(merged.keys, merged))
    return _labels(group for group in groups if len(group.numbers) > 1)


def _labels(groups: Iterable[_Group]) -> dict[int, str]:
    labels: dict[int, str] = {}
    taken: set[str] = set()
    for group in groups:
        names = sorted({_label(key) for key in group.keys})
        fixtures = "fixture" if len(names) == 1 else "fixtures"
        label = f"{fixtures} {', '.join(names[:3])}"
        while label in taken:
            label += " (another)"
        taken.add(label)
        labels.update(dict.fromkeys(group.numbers, label))
    return labels


def _shared_fixtures(item: Any, plugins: frozenset[str]) -> Iterator[_Key]:
    """The fixtures of a test that other tests may share.

    Fixtures of pytest and of installed plugins do not count: they are there to be shared by everything.
    """
    cls = item.getparent(pytest.Class)
    for definitions in fixture_definitions(item).values():
        for definition in definitions:
            if definition.scope == "function" or _is_of(definition, plugins) or _does_nothing(definition, item.cls):
                continue
            if definition.scope != "class":
                yield definition, ""
            elif cls is not None:
                yield definition, name_in_file(cls)


def _label(key: _Key) -> str:
    definition, cls = key
    name = str(definition.argname)
    if name.startswith(UNITTEST_FIXTURE):
        name = "setUpClass"
    elif name.startswith(XUNIT_FIXTURES):
        name = definition.func.__name__.removesuffix("_fixture").removeprefix("xunit_")
    return f"{cls}.{name}" if cls else name


def _is_xunit(definition: Any) -> bool:
    return str(definition.argname).startswith(XUNIT_FIXTURES)


def _is_of(definition: Any, packages: frozenset[str]) -> bool:
    package = str(getattr(definition.func, "__module__", "")).partition(".")[0]
    return package in packages and not _is_xunit(definition)


def _does_nothing(definition: Any, cls: Any) -> bool:
    """Whether it is the fixture for a class of unittest that has no fixture of its own."""
    if not str(definition.argname).startswith(UNITTEST_FIXTURE):
        return False
    for name in ("setUpClass", "tearDownClass"):
        function = getattr(getattr(cls, name), "__func__", None)
        if function is not getattr(unittest.TestCase, name).__func__:
            return False
    return True


def _packages_of_plugins(config: Any) -> frozenset[str]:
    packages = {"_pytest", Path(__file__).parents[2].name}
    for plugin, _ in config.pluginmanager.list_plugin_distinfo():
        module = str(getattr(plugin, "__name__", ""))
        packages.add(module.partition(".")[0])
    return frozenset(packages)
