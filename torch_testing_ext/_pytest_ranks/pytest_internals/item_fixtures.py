"""The fixtures of a test: their definitions, set-up and tear-down."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

# The fixtures of pytest that stand for setup_module, setup_class and unittest's fixtures begin so.
UNITTEST_FIXTURE = "_unittest_setUpClass_"
XUNIT_FIXTURES = ("_xunit_setup_", UNITTEST_FIXTURE)


def fixture_definitions(item: Any) -> dict[str, tuple[Any, ...]]:
    """The definitions of each fixture that a test uses: several, if one overrides another."""
    info = getattr(item, "_fixtureinfo", None)
    return {name: tuple(those) for name, those in info.name2fixturedefs.items()} if info is not None else {}


def fixtures_of(module: Mapping[str, Any]) -> list[str]:
    """The names of the fixtures that a module defines. `_pytestfixturefunction`: before 8.4."""
    names = []
    for name, value in module.items():
        marker = getattr(value, "_fixture_function_marker", None) or getattr(value, "_pytestfixturefunction", None)
        if marker is not None:
            names.append(marker.name or name)
    return names


def is_parameter(definition: Any) -> bool:
    """Whether a definition stands for a parameter of pytest.mark.parametrize."""
    return bool(definition.func.__name__ == "get_direct_param_fixture_func")


def is_fixture(function: Any) -> bool:
    """Whether a function is a fixture, before 8.4: since then a fixture is not a function."""
    return hasattr(function, "_pytestfixturefunction")


def add_fixtures(collector: Any, holder: types.ModuleType) -> None:
    """Let the tests of a collector find the fixtures in a module."""
    manager = collector.session._fixturemanager
    if "holder" in inspect.signature(manager.parsefactories).parameters:  # since 9.1
        manager.parsefactories(holder=holder, node=collector)
    else:
        manager.parsefactories(holder, collector.nodeid)


def fill_fixtures(item: Any) -> None:
    """Set up the fixtures of a test that are not in its `funcargs` yet."""
    item._request._fillfixtures()


def finalizers(item: Any) -> list[Any]:
    """The functions that tear a test down, the last first: changing the list changes what pytest calls."""
    those: list[Any] = item.session._setupstate.stack[item][0]
    return those


def take_over(session: Any, scope: str, names: tuple[str, ...]) -> None:
    """Leave the tear-down of all that is set up to the parent, in a process forked off it; widen these fixtures."""
    for finalizers, _ in session._setupstate.stack.values():
        finalizers.clear()
    for item in session.items:
        for definition in (
            found_definition for name in names for found_definition in fixture_definitions(item).get(name, ())[:1]
        ):
            definition._scope = type(definition._scope)(scope)


def set_up_in_session(item: Any) -> None:
    """Set a test up with all its fixtures, after the tear-down of what the previous test had and it does not need."""
    item.session._setupstate.teardown_exact(item)
    item._initrequest()
    item.session._setupstate.setup(item)


def take_finalizers(item: Any) -> list[Any]:
    """Take the functions that tear a test down away from pytest, if the test has been set up."""
    those: list[Any] = item.session._setupstate.stack.pop(item, ([], None))[0]
    return those


def tear_down_session(session: Any) -> None:
    session._setupstate.teardown_exact(None)


def argument_names(item: Any) -> tuple[str, ...]:
    """The fixtures and parameters with which pytest calls the function of a test."""
    return tuple(item._fixtureinfo.argnames)
