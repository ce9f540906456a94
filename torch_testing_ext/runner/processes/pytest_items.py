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
from torch_testing_ext._testing.bases.tests_for_pytest import PytestStyleTest, PytestTest
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import TIMEOUT, WHOLE_WORLD
from torch_testing_ext.runner.model import Test, TestId

from .pytest_collection import Collection, names_of_classes


def tests_of(collection: Collection) -> list[PytestTest]:
    """The tests that pytest has collected."""
    items = collection.items
    for item in items:
        # What is wrong with them is said when they run.
        marks.read_marks(item)
    if any(SPEC in item.stash for item in items):
        # Once, and not in each worker.
        importlib.import_module("torch_testing_ext._pytest_ranks.item_in_parent")
    together = _together(items, _packages_of_plugins(items[0].config) if items else frozenset())
    tests = []
    for number, item in enumerate(items):
        line = (item.location[1] or 0) + 1
        tests.append(PytestTest(collection, item, _owner(item), item.name, line, together.get(number, "")))
    return tests


def _owner(item: Any) -> str:
    """The name in its file of what a test is in, such as its class."""
    return name_in_file(item).removesuffix(item.name).removesuffix("::")


def test_case(item: Any) -> unittest.TestCase | None:
    """The test case that unittest would run; None for a test of another kind."""
    if not is_of_unittest(item):
        return None
    try:
        case: unittest.TestCase = item.cls(_function_name(item))
    except Exception:
        # pytest reports the same when it runs the test.
        return None
    return case


def not_collected(collection: Collection) -> list[tuple[PytestStyleTest, str]]:
    """An error for each part of the file that pytest could not collect."""
    errors = []
    for names, text in collection.failures:
        *classes, name = names or ("",)
        test = PytestStyleTest(".".join(classes), name, 0)
        errors.append((test, f"not run: pytest cannot collect it: {text}"))
    return errors


def left_out(collection: Collection) -> tuple[str, ...]:
    """The names of tests that pytest's options and hooks leave out."""
    names = [(*names_of_classes(item), _function_name(item)) for item in collection.deselected]
    # Each once, without its parameters.
    return tuple(dict.fromkeys(".".join(parts) for parts in (*names, *collection.dropped)))


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
            if definition.scope == "function" or _is_of(definition, plugins) or does_nothing(definition, item.cls):
                continue
            if definition.scope != "class":
                yield definition, ""
            elif cls is not None:
                yield definition, name_in_file(cls)


def _label(key: _Key) -> str:
    definition, cls = key
    name = _name(definition)
    return f"{cls}.{name}" if cls else name


def _name(definition: Any) -> str:
    name = str(definition.argname)
    if name.startswith(UNITTEST_FIXTURE):
        return "setUpClass"
    if name.startswith(XUNIT_FIXTURES):
        name = definition.func.__name__.removesuffix("_fixture").removeprefix("xunit_")
    return "setUpModule" if name == "setup_module" else name


def name_of_fixture(definition: Any, node: Any) -> str:
    """The name of a fixture for a user. `node`: the class, module or session of which it is set up."""
    owner = getattr(node, "obj", None)
    if not _is_xunit(definition) or owner is None:
        return f"fixture {_name(definition)}"
    name = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{_name(definition)} ({name})"


def _is_xunit(definition: Any) -> bool:
    return str(definition.argname).startswith(XUNIT_FIXTURES)


def _is_of(definition: Any, packages: frozenset[str]) -> bool:
    package = str(getattr(definition.func, "__module__", "")).partition(".")[0]
    return package in packages and not _is_xunit(definition)


def does_nothing(definition: Any, cls: Any) -> bool:
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
