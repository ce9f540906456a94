"""The mark `world_size` that the attributes of a class with DeepSpeed's names stand for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from torch_testing_ext._machine import accelerators
from torch_testing_ext._pytest_ranks.marks import DIST_ENV, NAME, BadMark, parameters, size_of_mark, sizes_of
from torch_testing_ext._pytest_ranks.pytest_internals import fixture_definitions, is_parameter

from .classes import DistributedExec, DistributedFixture, DistributedTest

# The methods by which DeepSpeed's harness does what is ours to do; an override of one would not be called.
_NOT_CALLED = (
    "__call__",
    "_launch_procs",
    "_launch_daemonic_procs",
    "_launch_non_daemonic_procs",
    "_launch_with_file_store",
    "_dist_run",
    "_dist_destroy",
    "_close_pool",
    "_get_fixture_kwargs",
    "_get_current_test_func",
)
_FLAGS = ("init_distributed", "set_dist_env", "requires_cuda_env", "reuse_dist_env", "non_daemonic_procs")


def mark_for(item: pytest.Function, mark: pytest.Mark) -> pytest.Mark:
    """The mark of a test of such a class: the keywords of its own mark win over the class. Raises BadMark."""
    check_class(item.cls)
    if has_size_as_argument(item):
        size = _size_of_argument(item)
        return _mark(size, keywords_for(item.cls, size))
    (sizes,) = mark.args if len(mark.args) == 1 else (None,)
    return _mark(sizes, keywords_for(item.cls, size_of_mark(item, mark), mark.kwargs))


def mark_of_fixture(cls: type[DistributedFixture]) -> pytest.Mark:
    """The mark that a class of a fixture stands for. Raises BadMark."""
    check_class(cls)
    if cls.run is DistributedFixture.run:
        raise BadMark("it has no method `run`")
    if isinstance(cls.world_size, (list, tuple)):
        raise BadMark(f"its world size is {cls.world_size!r}; it runs once, so it must be one number of ranks")
    size = _single_size(cls.world_size)
    return _mark(size, keywords_for(cls, size))


def _mark(sizes: Any, keywords: Mapping[str, Any]) -> pytest.Mark:
    made: pytest.Mark = getattr(pytest.mark, NAME)(sizes, **keywords).mark
    return made


def check_class(cls: type[DistributedExec]) -> None:
    """Raise BadMark for a class with an attribute that is wrong, or that is never used here."""
    ours = (DistributedExec, DistributedFixture, DistributedTest)
    of_project = [base for base in cls.__mro__ if base not in ours]
    not_called = _NOT_CALLED if issubclass(cls, DistributedFixture) else (*_NOT_CALLED, "run")
    for name in not_called:
        if any(name in vars(base) for base in of_project):
            raise BadMark(
                f"{cls.__name__} overrides {name}, which is never called here. Set world_size, backend, exec_timeout "
                f"or init_distributed, or do its work in a fixture that asks for {DIST_ENV}"
            )
    for name in _FLAGS:
        flag = getattr(cls, name)
        if not isinstance(flag, bool):
            raise BadMark(f"{cls.__name__}.{name} is {flag!r}; it must be True or False")


# -- keywords


def keywords_for(
    cls: type[DistributedExec], size: int, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The keywords of the mark of a class for this number of ranks; explicit ones win."""
    init = cls.init or _init_of_deepspeed(cls.backend)
    keywords = {"backend": cls.backend, "timeout": cls.exec_timeout, "init": init, **given}
    if keywords.get("devices") is None:
        if cls.requires_cuda_env or accelerators.device_count() > 0:
            keywords["devices"] = size
        elif keywords["backend"] is None:
            keywords["devices"] = 0
    return keywords


def _init_of_deepspeed(backend: str | None) -> Callable[..., object] | None:
    """Return how DeepSpeed makes a group, which `deepspeed.comm` then knows, too; None if nothing has imported it."""
    deepspeed = sys.modules.get("deepspeed")
    init = getattr(deepspeed, "init_distributed", None)
    return None if init is None else _with(init, backend)


# Equal for all tests of a class, which may share their ranks.
@functools.cache
def _with(init: Callable[..., object], backend: str | None) -> Callable[..., object]:
    return functools.partial(init, backend)


# -- sizes


def has_size_as_argument(item: Any) -> bool:
    """Whether a test is a method of a DistributedTest that takes its world size as an argument, without a mark."""
    if item.cls is None or not issubclass(item.cls, DistributedTest) or NAME not in item.fixturenames:
        return False
    return not any(mark.name == NAME for mark in item.own_markers)


def _size_of_argument(item: pytest.Function) -> int:
    """The world size that a parameter of the test gives it. Raises BadMark."""
    given = parameters(item)
    definitions = fixture_definitions(item).get(NAME, ())
    if NAME not in given or not all(is_parameter(definition) for definition in definitions):
        raise BadMark(f"its argument {NAME} is a fixture, whose value is unknown during collection. Parametrize it")
    return _single_size(given[NAME])


def _single_size(size: Any) -> int:
    """Check one world size as if a mark had it. Raises BadMark."""
    (checked,) = sizes_of(_mark(size, {}))
    return checked
