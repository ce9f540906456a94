"""The mark `world_size`: what it accepts, and which marked tests are refused at collection. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

NAME = "world_size"
DIST_ENV = "dist_env"
SIGNATURE = "world_size(size, *, backend=None, devices=0, timeout=None)"
# The name of the parameter by which a list of sizes becomes several tests.
PARAMETER = "_world_size_of_mark"
# Fixtures that observe what the test itself does: they are set up in the ranks, too.
OBSERVERS = ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys", "recwarn")

# These backends need an accelerator for each rank, also in "cpu:gloo,cuda:nccl".
_NEED_DEVICES = ("nccl", "xccl", "hccl")
_WIDER_SCOPES = ("class", "module", "package", "session")


class BadMark(Exception):
    """A marked test that cannot run as it is; the message names the remedy."""


@dataclass(frozen=True)
class RankSpec:
    """What the mark of a test says."""

    world_size: int
    backend: str | None = None
    devices: int = 0
    timeout: float | None = None


SPEC: pytest.StashKey[RankSpec] = pytest.StashKey()


def sizes_of(mark: pytest.Mark) -> list[int]:
    """The world sizes of a mark, one or several. Raises BadMark."""
    if len(mark.args) != 1:
        raise BadMark(f"the mark needs one argument, a world size or a list of them: {SIGNATURE}")
    given = mark.args[0]
    sizes = list(given) if isinstance(given, (list, tuple)) else [given]
    if not sizes:
        raise BadMark("the list of world sizes is empty: no test would run. Give at least one number")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BadMark(f"the world size is {size!r}; it must be a number of ranks, 1 or more")
    if len(set(sizes)) < len(sizes):
        raise BadMark(f"the world sizes {sizes} contain one twice")
    return sizes


def _spec(mark: pytest.Mark, size: int) -> RankSpec:
    known = {"backend", "devices", "timeout", "isolated"}
    if unknown := sorted(mark.kwargs.keys() - known):
        raise BadMark(f"unknown: {', '.join(unknown)}. Known are: {', '.join(sorted(known))}")
    backend, devices, timeout = (mark.kwargs.get(name) for name in ("backend", "devices", "timeout"))
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise BadMark(f"backend is {backend!r}; it must be a name, such as 'gloo'")
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 0):
        raise BadMark(f"devices is {devices!r}; it must be a number of accelerators, 0 or more")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise BadMark(f"timeout is {timeout!r}; it must be a number of seconds greater than 0")
    if devices is None and any(name in (backend or "") for name in _NEED_DEVICES):
        devices = size
    if mark.kwargs.get("isolated", True) is not True:
        raise BadMark(
            "isolated=False is not supported: every test has fresh ranks, which start in milliseconds. "
            "Leave it out, or use MultiProcContinuousTest for ranks that persist"
        )
    return RankSpec(size, backend, devices or 0, timeout)


def expand(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size of a list. A mark that is wrong is refused later, with every other fault."""
    mark = metafunc.definition.get_closest_marker(NAME)
    try:
        sizes = sizes_of(mark) if mark is not None and isinstance(mark.args[0], (list, tuple)) else []
    except (BadMark, IndexError):
        return
    if sizes:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, sizes, ids=[f"world_size={size}" for size in sizes])


def spec_of(item: pytest.Function) -> RankSpec | None:
    """What the mark of a test says; None without a mark. Raises BadMark, also if the test cannot run in ranks."""
    mark = item.get_closest_marker(NAME)
    if mark is None:
        if DIST_ENV in item.fixturenames:
            raise BadMark(f"it uses {DIST_ENV}, which only ranks have. Mark it: @pytest.mark.{NAME}(2)")
        return None
    if sum(each.name == NAME for each in item.own_markers) > 1:
        raise BadMark("it has the mark twice. Give one mark a list of sizes")
    size, *others = sizes_of(mark)
    if others or isinstance(mark.args[0], (list, tuple)):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if PARAMETER not in parameters:
            raise BadMark("a list of world sizes needs a test that pytest can parametrize; here, give one number")
        size = parameters[PARAMETER]
    spec = _spec(mark, size)
    _check_function(item)
    _check_fixtures(item)
    return spec


def _check_function(item: pytest.Function) -> None:
    function = inspect.unwrap(item.function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise BadMark("it is `async def`, which does not run in ranks. Make it a function that calls asyncio.run()")
    if inspect.isgeneratorfunction(function):
        raise BadMark("it contains `yield`, so that calling it runs nothing of it. Return instead")
    if getattr(item.function, "is_hypothesis_test", False):
        raise BadMark(
            "Hypothesis would draw other examples in each rank. Use a class of common_distributed and `given` of "
            "torch_testing_ext.hypothesis_utils"
        )
    if item.cls is not None and any(base.__name__ == "RankedTestCase" for base in item.cls.__mro__):
        raise BadMark(f"{item.cls.__name__} runs its tests in ranks by itself. Remove the mark, or use a plain class")


# -- fixtures


def rank_side(item: pytest.Function) -> frozenset[str]:
    """The fixtures of a test that are set up in the ranks: dist_env, what observes the test, and what needs these."""
    definitions = _definitions(item)
    found = {name for name in (DIST_ENV, *OBSERVERS) if name in item.fixturenames}
    while more := {
        name
        for name, those in definitions.items()
        if name not in found and any(found.intersection(each.argnames) for each in those)
    }:
        found |= more
    return frozenset(found)


def _check_fixtures(item: pytest.Function) -> None:
    """Refuse fixtures that outlive the ranks of one test, but need what only ranks have."""
    definitions = _definitions(item)
    for name in sorted(rank_side(item) - {DIST_ENV, *OBSERVERS}):
        for each in definitions[name]:
            if each.scope in _WIDER_SCOPES:
                raise BadMark(
                    f"its fixture {name!r} has the scope {each.scope!r} and needs {_need_of(name, definitions)}, which "
                    f"only the ranks of one test have. Give the fixture the scope 'function'"
                )
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if wrong := sorted({DIST_ENV}.intersection(parameters)):
        raise BadMark(f"it parametrizes {wrong[0]}. A parameter cannot depend on the rank: read dist_env in the test")


def _need_of(name: str, definitions: dict[str, tuple[Any, ...]]) -> str:
    """The fixture of ranks at the end of what a fixture asks for."""
    seen, todo = {name}, [name]
    for each in todo:  # grows while it is read
        if each in (DIST_ENV, *OBSERVERS):
            return each
        asked = {argument for definition in definitions.get(each, ()) for argument in definition.argnames} - seen
        seen |= asked
        todo += sorted(asked)
    return DIST_ENV


def _definitions(item: pytest.Function) -> dict[str, tuple[Any, ...]]:
    """The definitions of each fixture that a test uses: several, if one overrides another."""
    found: dict[str, tuple[Any, ...]] = {
        name: tuple(those) for name, those in item._fixtureinfo.name2fixturedefs.items()
    }
    return found


# -- collection


def faults(nodes: Iterable[Any]) -> Iterator[str]:
    """Give each marked test its RankSpec; yield what is wrong with those that cannot run."""
    for node in nodes:
        if isinstance(node, pytest.Function):
            try:
                spec = spec_of(node)
            except BadMark as error:
                yield f"{node.nodeid}: @pytest.mark.{NAME}: {error}."
            else:
                if spec is not None:
                    node.stash[SPEC] = spec
