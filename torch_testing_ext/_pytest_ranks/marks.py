"""The mark `world_size`: what it accepts, and which marked tests are refused when they would run. Imports no torch."""

from __future__ import annotations

import difflib
import inspect
import types
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from torch_testing_ext._process.devices_setting import AUTO, CPU, default_devices
from torch_testing_ext._process.words import nearest
from torch_testing_ext._pytest_ranks.pytest_internals.item_fixtures import fixture_definitions
from torch_testing_ext._pytest_ranks.pytest_internals.item_state import is_of_unittest
from torch_testing_ext._testing.marks.settings_of_tests import (
    checked_devices,
    devices_for,
)
from torch_testing_ext.faults import FaultPlan, Sweep, plan_of
from torch_testing_ext.launch.aspects.faults import FAULTS as FAULTS_OF_TEST, plan_on
from torch_testing_ext.launch.aspects.world import SIZE_OF_MARKS
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.most_ranks import too_many
from torch_testing_ext.launch.pretended_nodes import why_not

NAME = "world_size"


_STANDALONE = "standalone"


FAULTS = "faults"


_OURS = (NAME, _STANDALONE, FAULTS)


DIST_ENV = "dist_env"


RANKS = "ranks"


# The module of our fixtures; nothing here depends on it.
PLUGIN = f"{__name__.partition('.')[0]}.pytest_plugin"


# The name of the parameter by which a list of sizes becomes several tests.
PARAMETER = "_world_size_of_mark"


# Fixtures that observe what the test itself does: they are set up in the ranks, too.
OBSERVERS = ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys", "recwarn")


# The fixtures that are set up in ranks by themselves, not because they need another one.
_OF_RANKS = frozenset((DIST_ENV, RANKS, *OBSERVERS))


_KEYWORDS = ("backend", "devices", "init", "isolated", "nodes", "scope", "timeout")


_SCOPES = ("function", "class", "module", "package", "session")


# The scopes that ranks can have, too.
_SCOPES_OF_RANKS = _SCOPES[:3]


# A function that makes a process group.
_Init = Callable[..., object]


class BadMark(Exception):
    """A marked test that cannot run as it is; the message names the remedy."""


@dataclass(frozen=True)
class RankSpec:
    """The mark `world_size` of a test, checked."""

    world_size: int
    backend: str | None = None
    devices: int = 0
    # An accelerator for each rank, if the machine has them; otherwise the CPU.
    is_auto: bool = False
    timeout: float | None = None
    # The ranks are new interpreters, instead of forks of pytest's process.
    isolated: bool = False
    # Makes the group, in place of torch's function.
    init: _Init | None = None
    # Within which tests have the same ranks: also "class" and "module".
    scope: str = "function"
    # How many machines the ranks are on, as far as they can tell.
    nodes: int = 1

    def on(self, available: int, here: int | None = None) -> RankSpec:
        """The mark on a machine with so many accelerators, where so many of the ranks run: by default all."""
        if not self.is_auto:
            return self
        are_enough = available >= (here or self.world_size)
        return replace(self, devices=self.world_size if are_enough else 0, is_auto=False)


@dataclass(frozen=True)
class Standalone:
    """The mark `standalone` of a test, checked."""

    timeout: float | None = None


STANDALONE: pytest.StashKey[Standalone] = pytest.StashKey()


SPEC: pytest.StashKey[RankSpec] = pytest.StashKey()


# The marks of ours that were read, and what was wrong with them.
_Marks = tuple[pytest.Mark, ...]


_READ: pytest.StashKey[_Marks] = pytest.StashKey()


_FAULT: pytest.StashKey[str] = pytest.StashKey()


# The command of the runner that runs the test alone, if the runner runs it.
COMMAND: pytest.StashKey[str] = pytest.StashKey()


SHOW_COMMAND: pytest.StashKey[str] = pytest.StashKey()


# What the ranks of the test use, in words: the CPU, or devices.
PLACE: pytest.StashKey[str] = pytest.StashKey()


def sizes_of(mark: pytest.Mark) -> list[int]:
    """The world sizes of a mark, one or several. Raises BadMark."""
    given = _given_sizes(mark)
    sizes = list(given) if isinstance(given, (list, tuple)) else [given]
    if not sizes:
        raise BadMark("the list of world sizes is empty: no test would run. Give at least one number")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BadMark(f"the world size is {size!r}; it must be a number of ranks, 1 or more")
        why = too_many(size)
        if why:
            raise BadMark(f"the world size is {size}; {why}")
    if len(set(sizes)) < len(sizes):
        raise BadMark(f"the world sizes {sizes} contain one twice")
    return sizes


def _given_sizes(mark: pytest.Mark) -> Any:
    """The argument `size` of a mark. Raises BadMark."""
    sizes = [*mark.args, *(value for name, value in mark.kwargs.items() if name == "size")]
    if len(sizes) == 1:
        return sizes[0]
    if NAME in mark.kwargs and not sizes:
        raise BadMark(f"the mark has no argument {NAME}. Write @pytest.mark.{NAME}({mark.kwargs[NAME]!r})")
    raise BadMark(f"the mark {NAME} needs one argument, a size or a list of them: @pytest.mark.{NAME}(2)")


def spec_for(size: int, keywords: Mapping[str, Any], default: str = CPU) -> RankSpec:
    """Check the keywords of a mark. Raises BadMark.

    `default`: the project's setting, for a mark that says neither devices nor backend.
    """
    unknown = sorted(keywords.keys() - {"size", *_KEYWORDS})
    if "faults" in unknown:
        raise BadMark(
            f"the mark {NAME} has no argument faults: faults are a mark of their own, @pytest.mark.faults(...)"
        )
    if unknown:
        raise BadMark(f"the mark {NAME} has no argument {unknown[0]}.{nearest(unknown[0], _KEYWORDS)}")
    backend = _checked_backend(keywords.get("backend"))
    try:
        devices = checked_devices(keywords.get("devices"))
    except ValueError as error:
        raise BadMark(str(error)) from None
    timeout = keywords.get("timeout")
    _checked_timeout(timeout)
    devices = devices_for(devices, size, backend, default)
    is_auto = devices == AUTO
    isolated, scope = _checked_isolation(keywords)
    return RankSpec(
        size,
        backend,
        devices if isinstance(devices, int) else 0,
        is_auto,
        timeout,
        isolated,
        _checked_init(keywords.get("init")),
        scope,
        _checked_nodes(keywords.get("nodes", 1), size),
    )


# torch brings them.
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake")


def _checked_backend(backend: Any) -> str | None:
    if isinstance(backend, str) and backend:
        # One that torch does not bring may be that of an extension, which is not loaded yet.
        alike = nearest(backend, _BACKENDS) if backend.isidentifier() and backend.lower() not in _BACKENDS else ""
        if alike:
            raise BadMark(f"backend is {backend!r}.{alike}")
    if backend is None or (isinstance(backend, str) and backend):
        return backend
    raise BadMark(f"backend is {backend!r}; it must be a name, such as 'gloo'")


def _checked_nodes(nodes: Any, size: int) -> int:
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise BadMark(f"nodes is {nodes!r}; it must be a number of nodes, 1 or more")
    why = why_not(nodes, size)
    if why:
        raise BadMark(f"nodes is {nodes}; {why}")
    return nodes


def _checked_timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (is_number and timeout > 0):
        raise BadMark(f"timeout is {timeout!r}; it must be a number of seconds greater than 0")
    return float(timeout)


def _checked_init(init: Any) -> _Init | None:
    if init is None:
        return None
    if not callable(init):
        raise BadMark(f"init is {init!r}; it must be a function that makes the process group")
    return cast("_Init", init)


def _checked_isolation(keywords: Mapping[str, Any]) -> tuple[bool, str]:
    """Return `isolated` and `scope`, of which one excludes the other."""
    isolated = keywords.get("isolated", False)
    if not isinstance(isolated, bool):
        raise BadMark(f"isolated is {isolated!r}; it must be True or False")
    scope = keywords.get("scope", "function")
    if scope not in _SCOPES_OF_RANKS:
        raise BadMark(f"scope is {scope!r}; it must be one of {', '.join(_SCOPES_OF_RANKS)}")
    if isolated and scope != "function":
        raise BadMark(
            f"isolated=True starts new ranks for each test, but scope={scope!r} shares them. Give only one of the two"
        )
    return isolated, scope


def scope_node(item: Any, spec: RankSpec) -> Any:
    """The class or module whose tests share ranks with this one. A test without a class has them in its module."""
    of_class = item.getparent(pytest.Class) if spec.scope == "class" else None
    return of_class or item.getparent(pytest.Module)


def expand_world_sizes(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size of a list. A mark that is wrong is refused later, with every other fault."""
    mark = metafunc.definition.get_closest_marker(NAME)
    if mark is None:
        return
    try:
        sizes = sizes_of(mark)
        if not isinstance(_given_sizes(mark), (list, tuple)):
            return
    except BadMark:
        return
    of_run = SIZE_OF_MARKS.value()
    sizes = sizes if of_run is None else [of_run]
    metafunc.fixturenames.append(PARAMETER)
    metafunc.parametrize(PARAMETER, sizes, ids=[f"world_size={size}" for size in sizes])


def spec_of(item: pytest.Function) -> RankSpec | None:
    """Read the mark of a test; None without one. Raises BadMark, also if the test cannot run in ranks."""
    own_mark = item.get_closest_marker(NAME)
    mark = item.ihook.pytest_mark_of_ranks(item=item, mark=own_mark) or own_mark
    if mark is None:
        if item.get_closest_marker(FAULTS) is not None:
            remedy = f"Mark it: @pytest.mark.{NAME}(2); a class with ranks of its own has the decorator @faults"
            raise BadMark(f"it has faults, but no ranks of the plugin. {remedy}")
        if DIST_ENV in _ours(item):
            typos = difflib.get_close_matches(NAME, [own.name for own in item.iter_markers()], 1)
            typo = f" (it has the mark {typos[0]}: a typo?)" if typos else ""
            raise BadMark(f"the test uses {DIST_ENV}, which exists only in ranks. Add @pytest.mark.{NAME}(2){typo}")
        return None
    own_marks = [own for own in item.own_markers if own.name == NAME]
    if len(own_marks) > 1:
        raise BadMark(f"the test has the mark {NAME} twice. Give one mark a list of sizes")
    spec = spec_for(size_of_mark(item, mark), mark.kwargs, default_devices(item.config.rootpath))
    _check_function(item)
    _check_fixtures(item, spec)
    plan = plan_of_item(item)
    if plan is not None:
        kind = HostKind.INHERITING if spec.scope == "function" else HostKind.KEPT
        why = FAULTS_OF_TEST.why_not(plan, kind, spec.world_size)
        if why:
            raise BadMark(why)
    return spec


def plan_of_item(item: Any) -> FaultPlan | Sweep | None:
    """The faults of a test, by the mark or the decorator. Raises BadMark."""
    mark = item.get_closest_marker(FAULTS)
    of_decorator = plan_on(item.obj)
    if mark is None:
        return of_decorator
    if of_decorator is not None or sum(own.name == FAULTS for own in item.own_markers) > 1:
        raise BadMark(f"the test has faults twice. Give all of them to one mark {FAULTS}, or to one decorator")
    try:
        return plan_of(mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        raise BadMark(f"its mark {FAULTS}: {error}") from None


def size_of_mark(item: pytest.Function, mark: pytest.Mark) -> int:
    """The size that the mark gives this test; of a list, the one that pytest has made this test for."""
    sizes = sizes_of(mark)
    of_run = SIZE_OF_MARKS.value()
    if of_run is not None:
        return of_run
    size = parameters(item).get(PARAMETER)
    if size is None and len(sizes) > 1:
        raise BadMark(
            "pytest cannot parametrize this test, so it cannot have a list of world sizes. Give one number to a method "
            "of a unittest.TestCase, and to a test that a hook marks after collection"
        )
    if size is not None and size not in sizes:
        raise BadMark(
            f"the test was collected for {NAME}={size}, but a mark that was added later says {_given_sizes(mark)}"
        )
    return sizes[0] if size is None else size


def parameters(item: Any) -> dict[str, Any]:
    """The parameters that pytest has made this test for; none for a method of unittest."""
    callspec = getattr(item, "callspec", None)
    return getattr(callspec, "params", {})


def _check_function(item: pytest.Function) -> None:
    """Refuse a function of which a call would run nothing. A coroutine function is run by its rank."""
    function = item.obj
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadMark("the test contains `yield`, so calling it runs nothing. Use `return`")
    runs_coroutines = not is_of_unittest(item) or issubclass(item.cls, unittest.IsolatedAsyncioTestCase)
    if inspect.iscoroutinefunction(function) and not runs_coroutines:
        raise BadMark("the test is `async def`, which this class does not run. Use unittest.IsolatedAsyncioTestCase")
    bases = [] if item.cls is None else [base.__name__ for base in item.cls.__mro__]
    if "RankedTestCase" in bases:
        raise BadMark(f"{item.cls.__name__} already runs its tests in ranks. Remove the mark, or use a plain class")


def draw_for_all_ranks(item: Any) -> bool:
    """Let all ranks of a property get the same examples, also by Hypothesis's own `given`. False: it is none."""
    function = item.function
    if not getattr(function, "is_hypothesis_test", False):
        return False
    from torch_testing_ext._hypothesis.given_in_ranks import for_all_ranks

    test = for_all_ranks(function)
    if test is not function:
        item.obj = test if item.obj is function else types.MethodType(test, item.obj.__self__)
    return True


def rank_side(item: pytest.Function, spec: RankSpec | None = None) -> frozenset[str]:
    """The fixtures of a test that are set up in the ranks: dist_env, what observes the test, and what needs these.

    Of a test that shares its ranks: all. These were forked before it.
    """
    definitions = fixture_definitions(item)
    if spec is not None and spec.scope != "function":
        return frozenset((*definitions, *item.fixturenames)) - {"request"}
    in_ranks = _ours(item)
    while True:
        others = [name for name in definitions if name not in in_ranks]
        more = [name for name in others if _needs_ranks(definitions[name], in_ranks)]
        if not more:
            return frozenset(in_ranks)
        in_ranks.update(more)


def _needs_ranks(definitions: tuple[Any, ...], in_ranks: set[str]) -> bool:
    """Whether a fixture, by one of its definitions, asks for one of those that are set up in ranks."""
    arguments: set[str] = set()
    for definition in definitions:
        arguments.update(definition.argnames)
    return not in_ranks.isdisjoint(arguments) or any(_asks_for(definition.func) for definition in definitions)


def _ours(item: Any) -> set[str]:
    """The fixtures of ranks that a test uses: those of this plugin and those that observe the test."""
    used = _OF_RANKS.intersection(item.fixturenames)
    definitions = fixture_definitions(item)
    ours = set(used.intersection(OBSERVERS))
    for name in used - ours:
        if _is_ours(name, definitions.get(name, ())):
            ours.add(name)
    return ours


def _is_ours(name: str, definitions: tuple[Any, ...]) -> bool:
    """Whether a name stands for our fixture, perhaps for one that extends it, and not for one of the project."""
    for definition in reversed(definitions):
        if getattr(definition.func, "__module__", "") == PLUGIN:
            return True
        if name not in definition.argnames:
            return False
    return not definitions


def _asks_for(function: Any) -> bool:
    """Does a fixture call `request.getfixturevalue` for one of ours? In ranks, it can."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or "getfixturevalue" not in code.co_names:
        return False
    texts = [constant for constant in code.co_consts if isinstance(constant, str)]
    return not _OF_RANKS.isdisjoint(texts)


def _check_fixtures(item: pytest.Function, spec: RankSpec) -> None:
    """Refuse fixtures that outlive the ranks of one test, but need what only ranks have."""
    definitions = fixture_definitions(item)
    for name in sorted(rank_side(item) - _OF_RANKS):
        for definition in definitions[name]:
            _check_fixture(name, definition, spec, _need_of(name, definitions))
    if DIST_ENV in parameters(item):
        raise BadMark(
            f"the test parametrizes {DIST_ENV}, but a parameter cannot depend on the rank. Read dist_env in the test"
        )


def _check_fixture(name: str, definition: Any, spec: RankSpec, need: str) -> None:
    """Refuse a fixture that cannot be set up in the ranks of the test; it asks for `need`, a fixture of ranks."""
    if _is_async(definition.func):
        raise BadMark(
            f"fixture {name!r} is `async` and needs {need}, which exists only in ranks, but its event loop belongs to "
            f"the parent process. Call asyncio.run() in the fixture"
        )
    scope = definition.scope
    if _SCOPES.index(scope) > _SCOPES.index(spec.scope):
        unit = "test" if spec.scope == "function" else spec.scope
        or_share = f", or the mark scope={scope!r}" if scope in _SCOPES_OF_RANKS else ""
        raise BadMark(
            f"fixture {name!r} has scope {scope!r}, but needs {need}, which exists only in the ranks of one {unit}. "
            f"Give the fixture scope {spec.scope!r}{or_share}"
        )


def _is_async(function: Any) -> bool:
    """Whether a fixture needs an event loop. Older releases of pytest-asyncio replace it by a function of theirs."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    if module.startswith(("pytest_asyncio", "anyio")):
        function = inspect.unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _need_of(name: str, definitions: dict[str, tuple[Any, ...]]) -> str:
    """The fixture of ranks at the end of what a fixture asks for."""
    seen, todo = {name}, [name]
    # It grows while it is read.
    for needed in todo:
        if needed in _OF_RANKS:
            return needed
        asked: set[str] = set()
        for definition in definitions.get(needed, ()):
            asked.update(definition.argnames)
        todo += sorted(asked - seen)
        seen |= asked
    return DIST_ENV


def marks_of(item: Any) -> _Marks:
    """The marks of a test that are ours."""
    return tuple(mark for mark in item.iter_markers() if mark.name in _OURS)


def read_marks(item: Any) -> str:
    """Read the marks that a test has by now into its stash, and return what is wrong with them, or "".

    They are read again if they have changed: hooks and plugins mark tests at any time before these are set up.
    """
    marks = marks_of(item)
    if not _are_same(item.stash.get(_READ, None), marks):
        for stale in (SPEC, STANDALONE):
            if stale in item.stash:
                del item.stash[stale]
        item.stash[_READ], item.stash[_FAULT] = marks, ""
        item.stash[_FAULT] = _read_into_stash(item, marks)
    return str(item.stash[_FAULT])


def _read_into_stash(item: Any, marks: _Marks) -> str:
    """Read both marks, and return what is wrong with the first one that is wrong, or ""."""
    if not isinstance(item, pytest.Function):
        names = [mark.name for mark in marks if mark.name in _OURS]
        kind = type(item).__name__
        return (
            _fault(f"@pytest.mark.{names[0]}: a {kind} cannot run in ranks, only functions and methods can")
            if names
            else ""
        )
    try:
        spec = spec_of(item)
    except BadMark as error:
        return _fault(error)
    if spec is not None:
        item.stash[SPEC] = spec
    try:
        standalone = standalone_of(item)
    except BadMark as error:
        return _fault(error)
    if standalone is not None:
        item.stash[STANDALONE] = standalone
    return ""


def _fault(why: object) -> str:
    text = str(why)
    return text + "." * (not text.endswith((".", "?", ")")))


def were_read(item: Any) -> bool:
    """Whether the marks that a test has now are those that were read before it was set up."""
    return _are_same(item.stash.get(_READ, ()), marks_of(item))


def _are_same(some: _Marks | None, others: _Marks) -> bool:
    if some is None or len(some) != len(others):
        return False
    return all(mark is other for mark, other in zip(some, others, strict=True))


def standalone_of(item: pytest.Function) -> Standalone | None:
    """Read the mark `standalone`; None without it, unless the ranks are isolated. Raises BadMark."""
    mark = item.get_closest_marker(_STANDALONE)
    if mark is None:
        spec = item.stash.get(SPEC, None)
        if spec is None:
            return None
        is_isolated = spec.isolated or item.config.getini("dist_isolated")
        return Standalone() if is_isolated else None
    if mark.args or mark.kwargs.keys() - {"timeout"}:
        raise BadMark(f"the only argument of @pytest.mark.{_STANDALONE} is timeout=SECONDS")
    return Standalone(_checked_timeout(mark.kwargs.get("timeout")))
