"""Makes tests with our mark, and fixtures, of classes with DeepSpeed's names. Imports no torch."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from torch_testing_ext._cases.distributed_exec import DistributedFixture, DistributedTest

from . import pytest_internals
from .marks import DIST_ENV, NAME, RANKS_CLASS


def add_marks(nodes: Iterable[Any]) -> None:
    """Give the classes among collected nodes the marks that their attributes stand for."""
    for node in nodes:
        if isinstance(node, pytest.Class) and issubclass(node.obj, DistributedTest):
            if not any(mark.name == NAME for mark in node.own_markers):
                node.add_marker(getattr(pytest.mark, NAME)(node.obj.world_size))
            if node.obj.init_distributed is True:
                node.add_marker(pytest.mark.usefixtures(DIST_ENV))


# -- fixtures


def fixtures_in(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Fixtures for pytest, from the classes in the namespace of a module or class, by the classes' names."""
    return {
        name: pytest.fixture(name=name)(_function_of(value))
        for name, value in list(namespace.items())
        if isinstance(value, type) and issubclass(value, DistributedFixture) and value is not DistributedFixture
    }


def add_fixtures_to_plugin(plugin: types.ModuleType) -> None:
    """Let pytest find such fixtures in a conftest, or in a plugin, when it looks for fixtures there."""
    for name, fixture in fixtures_in(vars(plugin)).items():
        setattr(plugin, f"_{name}_as_a_fixture", fixture)


def add_fixtures_of(collector: Any) -> None:
    """Let pytest find them in a test file or class that is being collected."""
    found = fixtures_in(vars(collector.obj))
    if not found:
        return
    holder = types.ModuleType("fixtures that run in ranks")
    vars(holder).update(found)
    pytest_internals.add_fixtures(collector, holder)


def _function_of(cls: type[DistributedFixture]) -> Callable[..., object]:
    def fixture(**values: Any) -> object:
        request = values["request"]
        given = {name: value for name, value in values.items() if name in parameters}
        from . import exec_fixture

        return exec_fixture.run(cls, request, given)

    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    declared = list(inspect.signature(cls.run).parameters.values())[1:]
    parameters = [each.name for each in declared if each.kind in kinds and each.default is inspect.Parameter.empty]
    names = dict.fromkeys(["request", *parameters])
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
    fixture.__signature__ = signature  # type: ignore[attr-defined]
    fixture.__doc__ = cls.__doc__
    fixture.__module__ = cls.__module__
    setattr(fixture, RANKS_CLASS, cls)
    return fixture
