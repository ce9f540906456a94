"""The tests that pytest has collected in a file: which of them it runs, what they need, and which share fixtures."""

import importlib
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext._cases import pytest_style
from torch_testing_ext._cases.pytest_style import PytestStyleTest, PytestTest
from torch_testing_ext._machine.device_facts import DeviceNeeds
from torch_testing_ext._marks import needs
from torch_testing_ext._marks.settings_of_tests import TIMEOUT
from torch_testing_ext._pytest_ranks import marks
from torch_testing_ext._pytest_ranks.marks import SPEC
from torch_testing_ext._pytest_ranks.pytest_internals import (
    UNITTEST_FIXTURE,
    XUNIT_FIXTURES,
    fixture_definitions,
    is_of_unittest,
)

from ..model import Test, TestId
from .pytest_session import Collection, names_of_classes


def share_out(
    collection: Collection, tests: list[Any], styled: list[PytestStyleTest]
) -> tuple[list[Any], list[tuple[Any, str]], tuple[str, ...]]:
    """Each test is run by unittest or pytest, or cannot be collected, or is left out by pytest's options and hooks.

    Returns the tests that unittest runs, before those that pytest runs; those that are not run, and why; and the names
    of those left out.
    """
    by_pytest = list(_tests_for_pytest(collection, tests))
    moved = {_identity(one.case) for one in by_pytest if one.case is not None}
    deselected = {(item.cls, _function_name(item)) for item in collection.deselected if is_of_unittest(item)}
    by_unittest: list[Any] = []
    left_out = _names_of(item for item in collection.deselected if not is_of_unittest(item))
    missed: list[Any] = []
    for test in tests:
        if _identity(test) in moved:
            continue
        if not pytest_style.has_marks(test):
            by_unittest.append(test)
        elif _identity(test) in deselected:
            left_out.append(f"{type(test).__name__}.{test._testMethodName}")
        else:
            missed.append(test)
    collected = {*left_out, *_names_of(collection.items)}
    names = {test: f"{test.cls}.{test.method}".lstrip(".") for test in styled}
    lost = [test for test, name in names.items() if name not in collected]
    if collection.failures:
        missed += lost
    else:
        left_out += [names[test] for test in lost]
    return [*by_unittest, *by_pytest], _not_collected(collection, missed), tuple(left_out)


def _identity(test: Any) -> tuple[type, str]:
    return type(test), getattr(test, "_testMethodName", "")


def _not_collected(collection: Collection, missed: list[Any]) -> list[tuple[Any, str]]:
    """An error for each test that pytest could not collect, and for each failure that concerns none of these."""
    why = "\n\n".join(text for _, text in collection.failures) or "it does not find it, but only pytest heeds its marks"
    title = "not run: pytest cannot collect it"
    return [(test, f"{title}: {why}") for test in missed] or [
        (PytestStyleTest(".".join(names[:-1]), names[-1] if names else "", 0), f"{title}: {text}")
        for names, text in collection.failures
    ]


def _tests_for_pytest(collection: Collection, by_unittest: Iterable[Any]) -> Iterator[PytestTest]:
    """The tests that pytest runs: all that unittest does not find, and those of unittest that have marks of pytest."""
    cases = {_identity(test): test for test in by_unittest}
    items = collection.items
    for item in items:
        marks.read(item)  # what is wrong with them is said when they run
    if any(SPEC in item.stash for item in items):
        importlib.import_module("torch_testing_ext._pytest_ranks.in_parent")  # once, and not in each worker
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
    if next(item.iter_markers(), None) is not None:
        return True
    used = (each for definitions in fixture_definitions(item).values() for each in definitions)
    return any(not _is_xunit(each) and not _is_of(each, plugins) for each in used)


def _names_of(items: Iterable[Any]) -> list[str]:
    """Names of tests without their parameters, each once."""
    return list(dict.fromkeys(".".join([*names_of_classes(item), _function_name(item)]) for item in items))


def _function_name(item: Any) -> str:
    """Without the names of its parameters."""
    return str(getattr(item, "originalname", None) or item.name)


# -- needs


def describe(test: PytestTest, name: TestId, available: int) -> Test:
    """A test with its needs, by its marks and decorators. `available`: the number of devices of the run."""
    item = test.item
    spec = item.stash.get(SPEC, None)
    function, cls = getattr(item, "function", None), getattr(item, "cls", None)
    declared = [need for owner in (function, cls) for need in needs.needs_of(owner)]
    devices = needs.declared(declared, available)
    timeout = getattr(function, TIMEOUT, None) or getattr(cls, TIMEOUT, None)
    skip = item.get_closest_marker("skip")
    return Test(
        name,
        world_size=spec.world_size if spec is not None else 1,
        devices=max(devices, spec.devices if spec is not None else 0),
        of_devices=DeviceNeeds.of_all(need.of_devices for need in declared),
        backend=spec.backend if spec is not None else None,
        timeout=timeout if spec is None else spec.timeout or timeout or item.config.getoption("dist_timeout", None),
        has_ranks=spec is not None,
        together=test.together,
        skip=_reason(skip) if skip is not None else None,
        marks=tuple(sorted({mark.name for mark in item.iter_markers()})),
        line=test.line,
    )


def _reason(mark: pytest.Mark) -> str:
    given = mark.kwargs.get("reason") or (mark.args[0] if mark.args else "")
    return str(given or "unconditional skip")


# -- fixtures that tests share


_Key = tuple[Any, str]  # the definition of a fixture; the class whose tests share it, "" for the whole file


def _together(items: list[Any], plugins: frozenset[str]) -> dict[int, str]:
    """Name the fixtures that tests share, by the number of each test: those with one name run in one process."""
    shared = [list(_shared_fixtures(item, plugins)) for item in items]
    groups: list[tuple[set[_Key], list[int]]] = []
    group_of: dict[_Key, tuple[set[_Key], list[int]]] = {}
    for number, keys in enumerate(shared):
        if not keys:
            continue
        met = {id(group_of[key]): group_of[key] for key in keys if key in group_of}
        all_keys, numbers = set(keys), [number]
        for group in met.values():
            all_keys |= group[0]
            numbers = [*group[1], *numbers]
            groups.remove(group)
        groups.append((all_keys, numbers))
        group_of.update(dict.fromkeys(all_keys, groups[-1]))
    return _labels([group for group in groups if len(group[1]) > 1])


def _labels(groups: Iterable[tuple[set[_Key], list[int]]]) -> dict[int, str]:
    labels: dict[int, str] = {}
    taken: set[str] = set()
    for keys, numbers in groups:
        names = sorted({_label(key) for key in keys})
        label = f"fixture{'s' if len(names) > 1 else ''} {', '.join(names[:3])}"
        while label in taken:
            label += " (another)"
        taken.add(label)
        labels.update(dict.fromkeys(numbers, label))
    return labels


def _shared_fixtures(item: Any, plugins: frozenset[str]) -> Iterator[_Key]:
    """The fixtures of a test that other tests may share.

    Fixtures of pytest and of installed plugins do not count: they are there to be shared by everything.
    """
    for definitions in fixture_definitions(item).values():
        for each in definitions:
            if each.scope == "function" or _is_of(each, plugins) or _does_nothing(each, item.cls):
                continue
            if each.scope != "class":
                yield each, ""
            elif (cls := item.getparent(pytest.Class)) is not None:
                yield each, cls.nodeid.partition("::")[2]


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
    if not str(definition.argname).startswith(UNITTEST_FIXTURE):
        return False
    return all(
        getattr(getattr(cls, name), "__func__", None) is getattr(unittest.TestCase, name).__func__
        for name in ("setUpClass", "tearDownClass")
    )


def _packages_of_plugins(config: Any) -> frozenset[str]:
    plugins = (plugin for plugin, _ in config.pluginmanager.list_plugin_distinfo())
    names = {str(getattr(plugin, "__name__", "")).partition(".")[0] for plugin in plugins}
    return frozenset({*names, "_pytest", Path(__file__).parents[2].name})
