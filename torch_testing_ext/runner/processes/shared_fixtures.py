"""Fixtures and marks that tests of a file share: such tests run in one process."""

import unittest
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from torch_testing_ext._pytest_ranks.marks import NAME, SPEC, scope_node
from torch_testing_ext._pytest_ranks.pytest_internals.item_fixtures import (
    UNITTEST_FIXTURE,
    XUNIT_FIXTURES,
    fixture_definitions,
)
from torch_testing_ext._pytest_ranks.pytest_internals.item_state import name_in_file

# The definition of a fixture; the class whose tests share it, "" for the whole file. Or the name of a mark; its group.
_Key = tuple[Any, str]
# The marks of pytest-dependency and pytest-xdist.
_DEPENDENCY, _GROUP_OF_XDIST = "dependency", "xdist_group"


@dataclass(eq=False)
class _Group:
    """Tests that share fixtures, by their numbers."""

    keys: set[_Key]
    numbers: list[int]


def shared_by_tests(items: list[Any], plugins: frozenset[str]) -> dict[int, str]:
    """Name what tests share, by the number of each test: those with one name run in one process."""
    groups: list[_Group] = []
    group_of: dict[_Key, _Group] = {}
    for number, item in enumerate(items):
        keys = {*_shared_fixtures(item, plugins), *_shared_marks(item)}
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
        names = sorted({_label(key) for key in group.keys if not isinstance(key[0], str)})
        marks = sorted({mark for mark, _ in group.keys if isinstance(mark, str)})
        kinds = (("fixture", names[:3]), ("mark", marks))
        label = " and ".join(f"{kind}{'s' * (len(of) > 1)} {', '.join(of)}" for kind, of in kinds if of)
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


def _shared_marks(item: Any) -> Iterator[_Key]:
    spec = item.stash.get(SPEC, None)
    if spec is not None and spec.scope != "function":
        # Tests of a class or module whose ranks are alike share them.
        yield NAME, f"{scope_node(item, spec).nodeid} {spec}"
    if item.get_closest_marker(_DEPENDENCY) is not None:
        yield _DEPENDENCY, ""
    group = item.get_closest_marker(_GROUP_OF_XDIST)
    if group is not None:
        yield _GROUP_OF_XDIST, str(group.args[0] if group.args else group.kwargs.get("name", "default"))


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
