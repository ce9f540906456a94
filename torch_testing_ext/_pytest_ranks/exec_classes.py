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
        if not (isinstance(node, pytest.Class) and issubclass(node.obj, DistributedTest)):
            continue
        if not any(mark.name == NAME for mark in node.own_markers):
            node.add_marker(getattr(pytest.mark, NAME)(node.obj.world_size))
        if node.obj.init_distributed is True:
            node.add_marker(pytest.mark.usefixtures(DIST_ENV))


# -- fixtures


def fixtures_in(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Fixtures for pytest, from the classes in the namespace of a module or class, by the classes' names."""
    fixtures = {}
    for name, value in list(namespace.items()):
        if _is_fixture_class(value):
            as_fixture = pytest.fixture(name=name)
            fixtures[name] = as_fixture(_function_of(value))
    return fixtures


def _is_fixture_class(value: Any) -> bool:
    if not isinstance(value, type) or value is DistributedFixture:
        return False
    return issubclass(value, DistributedFixture)


def add_fixtures_to_plugin(plugin: types.ModuleType) -> None:
    """Let pytest find such fixtures in a conftest, or in a plugin, when it looks for fixtures there."""
    for name, fixture in fixtures_in(vars(plugin)).items():
        setattr(plugin, f"_{name}_as_a_fixture", fixture)


def add_fixtures_of(collector: Any) -> None:
    """Let pytest find them in a test file or class that is being collected."""
    fixtures = fixtures_in(vars(collector.obj))
    if not fixtures:
        return
    holder = types.ModuleType("fixtures that run in ranks")
    vars(holder).update(fixtures)
    pytest_internals.add_fixtures(collector, holder)


def _function_of(cls: type[DistributedFixture]) -> Callable[..., object]:
    """Make the function of a fixture, which asks for the fixtures that the class's `run` requires."""
    parameters = _required_arguments(cls.run)

    def fixture(**values: Any) -> object:
        request = values["request"]
        given = {name: value for name, value in values.items() if name in parameters}
        from . import exec_fixture

        return exec_fixture.run(cls, request, given)

    names = dict.fromkeys(["request", *parameters])
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    fixture.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    fixture.__doc__ = cls.__doc__
    fixture.__module__ = cls.__module__
    setattr(fixture, RANKS_CLASS, cls)
    return fixture


def _required_arguments(method: Callable[..., object]) -> list[str]:
    """The names of the arguments without a default, after `self`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *parameters = inspect.signature(method).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    return [parameter.name for parameter in required if parameter.kind in kinds]
