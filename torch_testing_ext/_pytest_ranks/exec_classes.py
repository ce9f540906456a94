"""Tests and fixtures of classes with DeepSpeed's names."""

from __future__ import annotations

import inspect
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._process.source_files import source_file
from torch_testing_ext._testing.bases import functions_and_scripts, launched_ranks, rank_accounts
from torch_testing_ext._testing.bases.distributed_exec import DistributedFixture, DistributedTest
from torch_testing_ext._testing.bases.invocation import case_of
from torch_testing_ext._testing.helpers.contexts import changed_environment
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import kinds_on, may_differ

from . import item_in_parent, item_in_rank, pytest_internals
from .marks import DIST_ENV, NAME, RANKS_CLASS, RankSpec, checked_class, spec_for

# --------------------------------------------------------------------------------------------------------------------
# A fixture that runs in ranks of its own, before the test that asks for it.


def run_fixture(cls: type[DistributedFixture], request: Any, given: dict[str, Any]) -> DistributedFixture:
    """Start the ranks of a fixture, from pytest's process. Its class has been checked at collection."""
    __tracebackhide__ = True
    spec = spec_for(cls.world_size, {}, checked_class(cls))
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
    with (
        tempfile.TemporaryDirectory() as directory,
        item_in_parent.leased_devices(request.config, request.node.nodeid, spec.devices) as shown,
    ):
        arguments = (instance, given, spec, Path(directory))
        functions_and_scripts.run_in_ranks(
            case,
            _in_rank,
            spec.world_size,
            arguments,
            timeout,
            collectives_may_differ=may_differ(cls, cls.run),
            sanitize=kinds_on(cls, cls.run),
            masks=shown,
        )
    return instance


def _in_rank(rank: int, instance: DistributedFixture, given: dict[str, Any], spec: RankSpec, directory: Path) -> None:
    with changed_environment(**dict(spec.environ)):
        group = item_in_rank.open_dist_env(spec, directory, rank)
        if instance.init_distributed:
            next(group)
        rank_accounts.refuse_what_ran_nothing(instance.run(**given))


# --------------------------------------------------------------------------------------------------------------------
# Makes tests with our mark, and fixtures, of classes with DeepSpeed's names. Imports no torch.


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

        return run_fixture(cls, request, given)

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
