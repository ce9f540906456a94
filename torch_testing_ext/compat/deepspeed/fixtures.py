"""Fixtures for pytest of classes with DeepSpeed's names, which run in ranks of their own before the test."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._pytest_ranks import dist_env, item_in_parent
from torch_testing_ext._pytest_ranks.marks import DIST_ENV, BadMark, RankSpec, rank_side, spec_for
from torch_testing_ext._pytest_ranks.pytest_internals.item_fixtures import fixture_definitions
from torch_testing_ext._pytest_ranks.refusals import note_refusal
from torch_testing_ext._testing.bases import launched_ranks, rank_accounts, spawned_functions
from torch_testing_ext._testing.bases.invocation import case_of
from torch_testing_ext._testing.helpers.contexts import changed_environment
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._tests.source_files import source_file

from .class_marks import mark_of_fixture
from .classes import DistributedFixture, environment_of

# What the function of such a fixture has: its class.
_CLASS = "class_of_fixture_in_ranks"


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


def _function_of(cls: type[DistributedFixture]) -> Callable[..., object]:
    """Make the function of a fixture, which asks for the fixtures that the class's `run` requires."""
    parameters = _required_arguments(cls.run)

    def fixture(**values: Any) -> object:
        request = values["request"]
        given = {name: value for name, value in values.items() if name in parameters}
        return _run_fixture(cls, request, given)

    names = dict.fromkeys(["request", *parameters])
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    fixture.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    fixture.__doc__ = cls.__doc__
    fixture.__module__ = cls.__module__
    setattr(fixture, _CLASS, cls)
    return fixture


def _required_arguments(method: Callable[..., object]) -> list[str]:
    """The names of the arguments without a default, after `self`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *parameters = inspect.signature(method).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    return [parameter.name for parameter in required if parameter.kind in kinds]


def refuse_in_ranks(item: pytest.Function) -> None:
    """Raise BadMark for a test with such a fixture that would be set up in the ranks of the test."""
    definitions = fixture_definitions(item)
    for name in sorted(rank_side(item).intersection(definitions)):
        if any(hasattr(definition.func, _CLASS) for definition in definitions[name]):
            raise BadMark(
                f"fixture {name!r} runs in ranks of its own, but needs {DIST_ENV}, or another fixture that exists only "
                f"in the ranks of the test. Its own ranks have a process group, unless init_distributed is False"
            )


def _run_fixture(cls: type[DistributedFixture], request: Any, given: dict[str, Any]) -> DistributedFixture:
    """Start the ranks of a fixture, from pytest's process."""
    __tracebackhide__ = True
    try:
        mark = mark_of_fixture(cls)
        spec = spec_for(mark.args[0], mark.kwargs)
    except BadMark as error:
        note_refusal(request.node, f"fixture {cls.__name__}: {error}")
    where = launch.this_launch()
    if where is not None:
        launched_ranks.check_launch()
        pytest.skip(f"{cls.__name__} starts ranks of its own, and a launcher has started {where.world_size}")
    skip = needs.devices(spec.devices).unmet() if spec.devices else None
    if skip is not None:
        pytest.skip(f"{cls.__name__}: {skip.message}")
    instance = cls()
    timeout = spec.timeout or request.config.getoption("rank_timeout", None)
    case = case_of(f"fixture {cls.__name__}", source_file(cls))
    need = item_in_parent.need_of_devices(request.config, request.node.nodeid, spec.devices)
    with tempfile.TemporaryDirectory() as directory:
        arguments = (instance, given, spec, Path(directory))
        spawned_functions.run_spawned(
            _in_rank, spec.world_size, arguments, timeout, need=need, case=case, targets=(cls, cls.run)
        )
    return instance


def _in_rank(rank: int, instance: DistributedFixture, given: dict[str, Any], spec: RankSpec, directory: Path) -> None:
    with changed_environment(**environment_of(type(instance), spec.world_size)):
        group = dist_env.open_dist_env(spec, directory, rank)
        if instance.init_distributed:
            next(group)
        rank_accounts.refuse_what_ran_nothing(instance.run(**given))
