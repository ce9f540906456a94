"""The plugin for pytest that makes marked tests, and fixtures, of classes with DeepSpeed's names."""

from __future__ import annotations

import types
import weakref
from collections.abc import Generator
from typing import Any

import pytest

from torch_testing_ext._pytest_ranks.marks import DIST_ENV, NAME
from torch_testing_ext._pytest_ranks.pytest_internals import item_fixtures

from .class_marks import mark_for
from .classes import DistributedTest
from .fixtures import fixtures_in, refuse_in_ranks
from .world_sizes import has_size_as_argument


@pytest.hookimpl(tryfirst=True)
def pytest_plugin_registered(plugin: Any) -> None:
    """Find the classes of fixtures in a conftest or plugin, before pytest looks for fixtures there."""
    if isinstance(plugin, types.ModuleType):
        for name, fixture in fixtures_in(vars(plugin)).items():
            setattr(plugin, f"_{name}_as_a_fixture", fixture)


_seen: weakref.WeakSet[Any] = weakref.WeakSet()


# Not pytest_make_collect_report: the plugin may come with the file that is being collected.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem(collector: Any) -> Generator[None, Any, Any]:
    """Find the classes of fixtures, when the first name of a file or class is looked at, and mark classes of tests."""
    if collector not in _seen:
        _seen.add(collector)
        _add_fixtures_of(collector)
    made = yield
    for node in made if isinstance(made, list) else [made]:
        if isinstance(node, pytest.Class) and issubclass(node.obj, DistributedTest):
            _mark(node)
    return made


def _add_fixtures_of(collector: Any) -> None:
    fixtures = fixtures_in(vars(collector.obj))
    if fixtures:
        holder = types.ModuleType("fixtures that run in ranks")
        vars(holder).update(fixtures)
        item_fixtures.add_fixtures(collector, holder)


def _mark(node: pytest.Class) -> None:
    """Give a class the marks that its attributes stand for."""
    if not any(mark.name == NAME for mark in node.own_markers):
        node.add_marker(getattr(pytest.mark, NAME)(node.obj.world_size))
    if node.obj.init_distributed is True:
        node.add_marker(pytest.mark.usefixtures(DIST_ENV))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Keep a test that has its size as an argument from being made for each size of its class, too."""
    if has_size_as_argument(metafunc.definition):
        metafunc.definition.add_marker(getattr(pytest.mark, NAME)(1), append=False)


def pytest_mark_of_ranks(item: pytest.Function, mark: pytest.Mark | None) -> pytest.Mark | None:
    refuse_in_ranks(item)
    if mark is None or item.cls is None or not issubclass(item.cls, DistributedTest):
        return None
    return mark_for(item, mark)
