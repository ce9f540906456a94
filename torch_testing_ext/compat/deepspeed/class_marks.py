"""The mark `world_size` that the attributes of a class with DeepSpeed's names stand for."""

from __future__ import annotations

import pytest

from torch_testing_ext._pytest_ranks.marks import DIST_ENV, BadMark, size_of_mark

from .classes import DistributedExec, DistributedFixture, DistributedTest
from .mark_keywords import keywords_for
from .world_sizes import has_size_as_argument, mark_of, single_size, size_of_argument

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
        size = size_of_argument(item)
        return mark_of(size, keywords_for(item.cls, size))
    (sizes,) = mark.args if len(mark.args) == 1 else (None,)
    return mark_of(sizes, keywords_for(item.cls, size_of_mark(item, mark), mark.kwargs))


def mark_of_fixture(cls: type[DistributedFixture]) -> pytest.Mark:
    """The mark that a class of a fixture stands for. Raises BadMark."""
    check_class(cls)
    if cls.run is DistributedFixture.run:
        raise BadMark("it has no method `run`")
    if isinstance(cls.world_size, (list, tuple)):
        raise BadMark(f"its world size is {cls.world_size!r}; it runs once, so it must be one number of ranks")
    size = single_size(cls.world_size)
    return mark_of(size, keywords_for(cls, size))


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
