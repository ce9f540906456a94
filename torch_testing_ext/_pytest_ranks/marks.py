"""The mark `world_size`: what it accepts, and which marked tests are refused when they would run. Imports no torch."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from torch_testing_ext._cases.distributed_exec import DistributedExec, DistributedFixture, DistributedTest
from torch_testing_ext._machine.backends import need_accelerators
from torch_testing_ext._process.launcher_variables import RENDEZVOUS
from torch_testing_ext.launch.settings import too_many

from .pytest_internals import fixture_definitions, is_of_unittest, is_parameter

NAME = "world_size"
DIST_ENV = "dist_env"
RANKS = "ranks"
# The module of our fixtures; nothing here depends on it.
PLUGIN = f"{__name__.partition('.')[0]}.pytest_plugin"
SIGNATURE = "world_size(size, *, backend=None, devices=0, timeout=None, isolated=False, init=None, scope='function')"
# The name of the parameter by which a list of sizes becomes several tests.
PARAMETER = "_world_size_of_mark"
# Fixtures that observe what the test itself does: they are set up in the ranks, too.
OBSERVERS = ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys", "recwarn")

# What a fixture function has that stands for a class of fixtures in ranks.
RANKS_CLASS = "torch_testing_ext_ranks_class"
# How other harnesses call what is ours to do; an override of one would not be called.
_NOT_CALLED = (
    *("__call__", "_launch_procs", "_launch_daemonic_procs", "_launch_non_daemonic_procs", "_launch_with_file_store"),
    *("_dist_run", "_dist_destroy", "_close_pool", "_get_fixture_kwargs", "_get_current_test_func"),
)
_SCOPES = ("function", "class", "module", "package", "session")


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
    init: Callable[..., object] | None = None  # makes the group, in place of torch's function
    scope: str = "function"  # within which tests have the same ranks: also "class" and "module"


@dataclass(frozen=True)
class Standalone:
    """The mark `standalone` of a test, checked."""

    timeout: float | None = None


STANDALONE: pytest.StashKey[Standalone] = pytest.StashKey()
SPEC: pytest.StashKey[RankSpec] = pytest.StashKey()
# The marks of ours that were read, and what was wrong with them.
_READ: pytest.StashKey[tuple[pytest.Mark, ...]] = pytest.StashKey()
_FAULT: pytest.StashKey[str] = pytest.StashKey()
# The command of run_test.py that runs the test alone, if run_test.py runs it.
COMMAND: pytest.StashKey[str] = pytest.StashKey()
SHOW_COMMAND: pytest.StashKey[str] = pytest.StashKey()


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
        if why := too_many(size):
            raise BadMark(f"the world size is {size}; {why}")
    if len(set(sizes)) < len(sizes):
        raise BadMark(f"the world sizes {sizes} contain one twice")
    return sizes


def spec_for(size: int, keywords: Mapping[str, Any], of_class: type[DistributedExec] | None) -> RankSpec:
    """Check the keywords of a mark, and add what the class of the test says. Raises BadMark."""
    known = {"backend", "devices", "timeout", "isolated", "init", "scope"}
    if unknown := sorted(keywords.keys() - known):
        raise BadMark(f"unknown: {', '.join(unknown)}. Known are: {', '.join(sorted(known))}")
    environ: dict[str, str | None] = {}
    if of_class is not None:
        init = of_class.init or _init_of_deepspeed(of_class.backend)
        keywords = {"backend": of_class.backend, "timeout": of_class.exec_timeout, "init": init, **keywords}
        environ = {"LOCAL_SIZE": str(size)} if of_class.set_dist_env else dict.fromkeys(RENDEZVOUS)
    backend, devices, timeout = (keywords.get(name) for name in ("backend", "devices", "timeout"))
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise BadMark(f"backend is {backend!r}; it must be a name, such as 'gloo'")
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 0):
        raise BadMark(f"devices is {devices!r}; it must be a number of accelerators, 0 or more")
    _checked_timeout(timeout)
    if devices is None and need_accelerators(backend):
        devices = size
    if devices is None and of_class is not None and (of_class.requires_cuda_env or _has_accelerators()):
        devices = size
    isolated = keywords.get("isolated", False)
    if not isinstance(isolated, bool):
        raise BadMark(f"isolated is {isolated!r}; it must be True or False")
    if (init := keywords.get("init")) is not None and not callable(init):
        raise BadMark(f"init is {init!r}; it must be a function that makes the process group")
    if (scope := keywords.get("scope", "function")) not in _SCOPES[:3]:
        raise BadMark(f"scope is {scope!r}; it must be one of {', '.join(_SCOPES[:3])}")
    if isolated and scope != "function":
        raise BadMark(f"isolated=True has new ranks for each test, and scope={scope!r} has not. Give one of them")
    return RankSpec(size, backend, devices or 0, timeout, tuple(environ.items()), isolated, init, scope)


def _init_of_deepspeed(backend: str | None) -> Callable[..., object] | None:
    """Return how DeepSpeed makes a group, which `deepspeed.comm` then knows, too; None if nothing has imported it."""
    init = getattr(sys.modules.get("deepspeed"), "init_distributed", None)
    return init and _with(init, backend)


@functools.cache  # equal for all tests of a class, which may share their ranks
def _with(init: Callable[..., object], backend: str | None) -> Callable[..., object]:
    return functools.partial(init, backend)


def scope_node(item: Any, spec: RankSpec) -> Any:
    """The class or module whose tests share ranks with this one. A test without a class has them in its module."""
    return (item.getparent(pytest.Class) if spec.scope == "class" else None) or item.getparent(pytest.Module)


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
        if DIST_ENV in _ours(item):
            raise BadMark(f"it uses {DIST_ENV}, which only ranks have. Mark it: @pytest.mark.{NAME}(2)")
        return None
    if sum(each.name == NAME for each in item.own_markers) > 1:
        raise BadMark("it has the mark twice. Give one mark a list of sizes")
    size = _size_of_argument(item) if _has_size_as_argument(item) else _size_of_mark(item, mark)
    spec = spec_for(size, mark.kwargs, checked_class(item.cls))
    _check_function(item)
    _check_fixtures(item, spec)
    return spec


def _size_of_mark(item: pytest.Function, mark: pytest.Mark) -> int:
    """The size that the mark gives this test; of a list, the one that pytest has made this test for."""
    sizes = sizes_of(mark)
    size = getattr(getattr(item, "callspec", None), "params", {}).get(PARAMETER)
    if size is None and len(sizes) > 1:
        raise BadMark(
            "a list of world sizes needs a test that pytest can parametrize, and has to be there when it does: the "
            "methods of a unittest.TestCase, and what a hook marks after the collection, can have one number"
        )
    if size is not None and size not in sizes:
        raise BadMark(f"it was made for {NAME}={size}, but a mark that was added later says {mark.args[0]}")
    return sizes[0] if size is None else size


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
    """Refuse a function of which a call would run nothing. A coroutine function is run by its rank."""
    function = item.obj
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadMark("it contains `yield`, so that calling it runs nothing of it. Return instead")
    runs_coroutines = not is_of_unittest(item) or issubclass(item.cls, unittest.IsolatedAsyncioTestCase)
    if inspect.iscoroutinefunction(function) and not runs_coroutines:
        raise BadMark("it is `async def`, which this class does not run. Use unittest.IsolatedAsyncioTestCase")
    if getattr(item.function, "is_hypothesis_test", False):
        raise BadMark(
            "Hypothesis would draw other examples in each rank. Use a class of common_distributed and `given` of "
            "torch_testing_ext.hypothesis_utils"
        )
    if item.cls is not None and any(base.__name__ == "RankedTestCase" for base in item.cls.__mro__):
        raise BadMark(f"{item.cls.__name__} runs its tests in ranks by itself. Remove the mark, or use a plain class")


# -- fixtures


def rank_side(item: pytest.Function, spec: RankSpec | None = None) -> frozenset[str]:
    """The fixtures of a test that are set up in the ranks: dist_env, what observes the test, and what needs these.

    Of a test that shares its ranks: all. These were forked before it.
    """
    definitions = fixture_definitions(item)
    if spec is not None and spec.scope != "function":
        return frozenset((*definitions, *item.fixturenames)) - {"request"}
    found = _ours(item)
    while more := {
        name
        for name, those in definitions.items()
        if name not in found and any(_asks_for(each.func) or found.intersection(each.argnames) for each in those)
    }:
        found |= more
    return frozenset(found)


def _ours(item: Any) -> set[str]:
    """The fixtures of ranks that a test uses: those of this plugin and those that observe the test."""
    definitions = fixture_definitions(item)
    names = [name for name in (DIST_ENV, RANKS, *OBSERVERS) if name in item.fixturenames]
    return {name for name in names if name in OBSERVERS or _is_ours(name, definitions.get(name, ()))}


def _is_ours(name: str, definitions: tuple[Any, ...]) -> bool:
    """Whether a name stands for our fixture, perhaps for one that extends it, and not for one of the project."""
    for each in reversed(definitions):
        if getattr(each.func, "__module__", "") == PLUGIN:
            return True
        if name not in each.argnames:
            return False
    return not definitions


def _asks_for(function: Any) -> bool:
    """Whether a fixture calls `request.getfixturevalue` for one of ours: in ranks, it can."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or "getfixturevalue" not in code.co_names:
        return False
    return not {DIST_ENV, RANKS, *OBSERVERS}.isdisjoint(each for each in code.co_consts if isinstance(each, str))


def _check_fixtures(item: pytest.Function, spec: RankSpec) -> None:
    """Refuse fixtures that outlive the ranks of one test, but need what only ranks have."""
    definitions = fixture_definitions(item)
    for name in sorted(rank_side(item) - {DIST_ENV, RANKS, *OBSERVERS}):
        for each in definitions[name]:
            if hasattr(each.func, RANKS_CLASS):
                raise BadMark(
                    f"its fixture {name!r} runs in ranks of its own and needs {_need_of(name, definitions)}, which "
                    f"only the ranks of the test have. They have a process group unless init_distributed is False"
                )
            if _is_async(each.func):
                raise BadMark(
                    f"its fixture {name!r} is `async` and needs {_need_of(name, definitions)}, which only ranks have: "
                    f"its event loop belongs to the parent process. Call asyncio.run() in the fixture"
                )
            if _SCOPES.index(each.scope) > _SCOPES.index(spec.scope):
                unit = "test" if spec.scope == "function" else spec.scope
                or_share = f", or the mark scope={each.scope!r}" if each.scope in _SCOPES[:3] else ""
                raise BadMark(
                    f"its fixture {name!r} has the scope {each.scope!r} and needs {_need_of(name, definitions)}, which "
                    f"only the ranks of one {unit} have. Give the fixture the scope {spec.scope!r}{or_share}"
                )
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if wrong := sorted({DIST_ENV}.intersection(parameters)):
        raise BadMark(f"it parametrizes {wrong[0]}. A parameter cannot depend on the rank: read dist_env in the test")


def _is_async(function: Any) -> bool:
    """Whether a fixture needs an event loop: older releases of pytest-asyncio replace it by a function of theirs."""
    if getattr(function, "__globals__", {}).get("__name__", "").startswith(("pytest_asyncio", "anyio")):
        function = inspect.unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


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
        if each in (DIST_ENV, RANKS, *OBSERVERS):
            return each
        asked = {argument for definition in definitions.get(each, ()) for argument in definition.argnames} - seen
        seen |= asked
        todo += sorted(asked)
    return DIST_ENV


# -- reading


def marks_of(item: Any) -> tuple[pytest.Mark, ...]:
    """The marks of a test that are ours; Lightning's `RunIf(standalone=True)` is a skipif with that keyword."""
    return tuple(
        mark for mark in item.iter_markers() if mark.name in (NAME, "standalone") or "standalone" in mark.kwargs
    )


def read(item: Any) -> str:
    """Read the marks that a test has by now into its stash, and return what is wrong with them, or "".

    They are read again if they have changed: hooks and plugins mark tests at any time before these are set up.
    """
    marks = marks_of(item)
    if not _are_same(item.stash.get(_READ, None), marks):
        for stale in (SPEC, STANDALONE):
            if stale in item.stash:
                del item.stash[stale]
        item.stash[_READ], item.stash[_FAULT] = marks, ""
        name = NAME
        try:
            if isinstance(item, pytest.Function):
                if (spec := spec_of(item)) is not None:
                    item.stash[SPEC] = spec
                name = "standalone"
                if (wish := standalone_of(item)) is not None:
                    item.stash[STANDALONE] = wish
            elif named := [mark.name for mark in marks if mark.name in (NAME, "standalone")]:
                name = named[0]
                raise BadMark(f"it is a {type(item).__name__}; only functions and methods can run so")
        except BadMark as error:
            item.stash[_FAULT] = f"@pytest.mark.{name}: {error}."
    return str(item.stash[_FAULT])


def were_read(item: Any) -> bool:
    """Whether the marks that a test has now are those that were read before it was set up."""
    return _are_same(item.stash.get(_READ, ()), marks_of(item))


def _are_same(some: tuple[pytest.Mark, ...] | None, others: tuple[pytest.Mark, ...]) -> bool:
    return some is not None and list(map(id, some)) == list(map(id, others))


def standalone_of(item: pytest.Function) -> Standalone | None:
    """Read the mark `standalone`; None without it, unless the ranks are isolated. Raises BadMark.

    Lightning's `RunIf(standalone=True)` is a skipif with that keyword, which skips unless this variable is set.
    """
    is_asked_for = os.environ.get("PL_RUN_STANDALONE_TESTS") == "1"
    if is_asked_for and any(mark.kwargs.get("standalone") for mark in item.iter_markers("skipif")):
        return Standalone()
    mark, spec = item.get_closest_marker("standalone"), item.stash.get(SPEC, None)
    if mark is None:
        is_isolated = spec is not None and (spec.isolated or item.config.getoption("dist_isolated", False))
        return Standalone() if is_isolated else None
    if mark.args or mark.kwargs.keys() - {"timeout"}:
        raise BadMark("it takes nothing but timeout, in seconds")
    return Standalone(_checked_timeout(mark.kwargs.get("timeout")))
