"""The mark `world_size`: what it accepts, and which marked tests are refused at collection. Imports no torch."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from torch_testing_ext._cases.distributed_exec import DistributedExec, DistributedFixture, DistributedTest

from .pytest_internals import fixture_definitions, is_parameter

NAME = "world_size"
DIST_ENV = "dist_env"
SIGNATURE = "world_size(size, *, backend=None, devices=0, timeout=None, isolated=False)"
# The name of the parameter by which a list of sizes becomes several tests.
PARAMETER = "_world_size_of_mark"
# Fixtures that observe what the test itself does: they are set up in the ranks, too.
OBSERVERS = ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys", "recwarn")

# These backends need an accelerator for each rank, also in "cpu:gloo,cuda:nccl".
_NEED_DEVICES = ("nccl", "xccl", "hccl")
# What a fixture function has that stands for a class of fixtures in ranks.
RANKS_CLASS = "torch_testing_ext_ranks_class"
# How other harnesses call what is ours to do; an override of one would not be called.
_NOT_CALLED = (
    *("__call__", "_launch_procs", "_launch_daemonic_procs", "_launch_non_daemonic_procs", "_launch_with_file_store"),
    *("_dist_run", "_dist_destroy", "_close_pool", "_get_fixture_kwargs", "_get_current_test_func"),
)
_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WIDER_SCOPES = ("class", "module", "package", "session")


class BadMark(Exception):
    """A marked test that cannot run as it is; the message names the remedy."""


@dataclass(frozen=True)
class RankSpec:
    """The mark `world_size` of a test, checked."""

    world_size: int
    backend: str | None = None
    devices: int = 0
    timeout: float | None = None
    environ: tuple[tuple[str, str | None], ...] = ()  # changes of the environment for the test
    isolated: bool = False  # in a new interpreter, instead of forked off pytest's process


@dataclass(frozen=True)
class Standalone:
    """The mark `standalone` of a test, checked."""

    timeout: float | None = None


STANDALONE: pytest.StashKey[Standalone] = pytest.StashKey()
SPEC: pytest.StashKey[RankSpec] = pytest.StashKey()
# The command of run_test.py that runs the test alone, if run_test.py runs it.
COMMAND: pytest.StashKey[str] = pytest.StashKey()


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


def spec_for(size: int, keywords: Mapping[str, Any], of_class: type[DistributedExec] | None) -> RankSpec:
    """Check the keywords of a mark, and add what the class of the test says. Raises BadMark."""
    known = {"backend", "devices", "timeout", "isolated"}
    if unknown := sorted(keywords.keys() - known):
        raise BadMark(f"unknown: {', '.join(unknown)}. Known are: {', '.join(sorted(known))}")
    environ: dict[str, str | None] = {}
    if of_class is not None:
        keywords = {"backend": of_class.backend, "timeout": of_class.exec_timeout, **keywords}
        environ = {"LOCAL_SIZE": str(size)} if of_class.set_dist_env else dict.fromkeys(_RENDEZVOUS)
    backend, devices, timeout = (keywords.get(name) for name in ("backend", "devices", "timeout"))
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise BadMark(f"backend is {backend!r}; it must be a name, such as 'gloo'")
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 0):
        raise BadMark(f"devices is {devices!r}; it must be a number of accelerators, 0 or more")
    _checked_timeout(timeout)
    if devices is None and any(name in (backend or "") for name in _NEED_DEVICES):
        devices = size
    if devices is None and of_class is not None and (of_class.requires_cuda_env or _has_accelerators()):
        devices = size
    isolated = keywords.get("isolated", False)
    if not isinstance(isolated, bool):
        raise BadMark(f"isolated is {isolated!r}; it must be True or False")
    return RankSpec(size, backend, devices or 0, timeout, tuple(environ.items()), isolated)


def _checked_timeout(timeout: Any) -> float | None:
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise BadMark(f"timeout is {timeout!r}; it must be a number of seconds greater than 0")
    return None if timeout is None else float(timeout)


def _has_accelerators() -> bool:
    from torch_testing_ext._machine import accelerators

    return accelerators.device_count() > 0


def checked_class(cls: Any) -> type[DistributedExec] | None:
    """Return a class whose attributes are valid; None if it is no DistributedTest or DistributedFixture.

    Raises BadMark.
    """
    if not (isinstance(cls, type) and issubclass(cls, DistributedExec)):
        return None
    names = (*_NOT_CALLED, *(() if issubclass(cls, DistributedFixture) else ("run",)))
    of_others = [base for base in cls.__mro__ if base not in (DistributedExec, DistributedFixture, DistributedTest)]
    for name in names:
        if any(name in vars(base) for base in of_others):
            raise BadMark(
                f"{cls.__name__} overrides {name}, which is not called here. Set world_size, backend, exec_timeout or "
                f"init_distributed, or let a fixture that asks for {DIST_ENV} do what has to be done in the ranks"
            )
    for name in ("init_distributed", "set_dist_env", "requires_cuda_env", "reuse_dist_env", "non_daemonic_procs"):
        if not isinstance(flag := getattr(cls, name), bool):
            raise BadMark(f"{cls.__name__}.{name} is {flag!r}; it must be True or False")
    return cls


def expand(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size of a list. A mark that is wrong is refused later, with every other fault."""
    mark = metafunc.definition.get_closest_marker(NAME)
    if _has_size_as_argument(metafunc.definition):
        return
    try:
        sizes = sizes_of(mark) if mark is not None and isinstance(mark.args[0], (list, tuple)) else []
    except (BadMark, IndexError):
        return
    if sizes:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, sizes, ids=[f"world_size={size}" for size in sizes])


def spec_of(item: pytest.Function) -> RankSpec | None:
    """Read the mark of a test; None without one. Raises BadMark, also if the test cannot run in ranks."""
    _check_fixtures_in_ranks(item)
    mark = item.get_closest_marker(NAME)
    if mark is None:
        if DIST_ENV in item.fixturenames:
            raise BadMark(f"it uses {DIST_ENV}, which only ranks have. Mark it: @pytest.mark.{NAME}(2)")
        return None
    if sum(each.name == NAME for each in item.own_markers) > 1:
        raise BadMark("it has the mark twice. Give one mark a list of sizes")
    if _has_size_as_argument(item):
        size = _size_of_argument(item)
    elif len(sizes := sizes_of(mark)) == 1 and not isinstance(mark.args[0], (list, tuple)):
        size = sizes[0]
    else:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if PARAMETER not in parameters:
            raise BadMark("a list of world sizes needs a test that pytest can parametrize; here, give one number")
        size = parameters[PARAMETER]
    spec = spec_for(size, mark.kwargs, checked_class(item.cls))
    _check_function(item)
    _check_fixtures(item)
    return spec


def _has_size_as_argument(item: Any) -> bool:
    """Is the test a method of a DistributedTest that takes its world size as an argument, and has no mark itself?"""
    if item.cls is None or not issubclass(item.cls, DistributedTest):
        return False
    return NAME in item.fixturenames and not any(mark.name == NAME for mark in item.own_markers)


def _size_of_argument(item: pytest.Function) -> int:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if NAME not in parameters or any(
        not is_parameter(definition) for definition in fixture_definitions(item).get(NAME, ())
    ):
        raise BadMark(f"its argument {NAME} is a fixture, whose value is not known at collection. Parametrize it")
    (size,) = sizes_of(pytest.mark.world_size(parameters[NAME]).mark)
    return size


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
    definitions = fixture_definitions(item)
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
    definitions = fixture_definitions(item)
    for name in sorted(rank_side(item) - {DIST_ENV, *OBSERVERS}):
        for each in definitions[name]:
            if hasattr(each.func, RANKS_CLASS):
                raise BadMark(
                    f"its fixture {name!r} runs in ranks of its own and needs {_need_of(name, definitions)}, which "
                    f"only the ranks of the test have. They have a process group unless init_distributed is False"
                )
            function = inspect.unwrap(each.func)  # older releases of pytest-asyncio replace it
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                raise BadMark(
                    f"its fixture {name!r} is `async` and needs {_need_of(name, definitions)}, which only ranks have: "
                    f"its event loop belongs to the parent process. Call asyncio.run() in the fixture"
                )
            if each.scope in _WIDER_SCOPES:
                raise BadMark(
                    f"its fixture {name!r} has the scope {each.scope!r} and needs {_need_of(name, definitions)}, which "
                    f"only the ranks of one test have. Give the fixture the scope 'function'"
                )
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if wrong := sorted({DIST_ENV}.intersection(parameters)):
        raise BadMark(f"it parametrizes {wrong[0]}. A parameter cannot depend on the rank: read dist_env in the test")


def _check_fixtures_in_ranks(item: pytest.Function) -> None:
    """Refuse fixtures that run in ranks of their own, but do not say how."""
    for those in fixture_definitions(item).values():
        cls = getattr(those[-1].func, RANKS_CLASS, None) if those else None
        if cls is None:
            continue
        try:
            if cls.run is DistributedFixture.run:
                raise BadMark("it has no method `run`")
            if isinstance(cls.world_size, (list, tuple)):
                raise BadMark(f"its world size is {cls.world_size!r}; it runs once, so it must be one number of ranks")
            (size,) = sizes_of(pytest.mark.world_size(cls.world_size).mark)
            spec_for(size, {}, checked_class(cls))
        except BadMark as error:
            raise BadMark(f"its fixture {cls.__name__}: {error}") from None


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


# -- collection


def faults(nodes: Iterable[Any]) -> Iterator[str]:
    """Give each marked test its RankSpec; yield what is wrong with those that cannot run."""
    marks: Any = ((NAME, spec_of, SPEC), ("standalone", standalone_of, STANDALONE))  # the second needs the first
    for node in nodes:
        if isinstance(node, pytest.Function):
            for name, read, key in marks:
                try:
                    if (found := read(node)) is not None:
                        node.stash[key] = found
                except BadMark as error:
                    yield f"{node.nodeid}: @pytest.mark.{name}: {error}."


def _is_isolated(item: pytest.Function) -> bool:
    spec = item.stash.get(SPEC, None)
    return spec is not None and (spec.isolated or bool(item.config.getoption("dist_isolated", False)))


def standalone_of(item: pytest.Function) -> Standalone | None:
    """Read the mark `standalone`; None without it, unless the ranks are isolated. Raises BadMark.

    Lightning's `RunIf(standalone=True)` is a skipif with that keyword, which skips unless this variable is set.
    """
    is_asked_for = os.environ.get("PL_RUN_STANDALONE_TESTS") == "1"
    if is_asked_for and any(mark.kwargs.get("standalone") for mark in item.iter_markers("skipif")):
        return Standalone()
    mark = item.get_closest_marker("standalone")
    if mark is None:
        return Standalone() if _is_isolated(item) else None
    if mark.args or mark.kwargs.keys() - {"timeout"}:
        raise BadMark("it takes nothing but timeout, in seconds")
    return Standalone(_checked_timeout(mark.kwargs.get("timeout")))
