"""The members by which PyTorch's bases start and watch ranks and which ours lack, and the names that a class uses."""

import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch_testing_ext._process.code_names import names_in

from . import mapping, members_of_classes


def used_by(cls: type) -> set[str]:
    """All names that a class defines or that its functions look up."""
    used = set(vars(cls))
    for value in vars(cls).values():
        for code in _codes_of(value):
            used |= names_in(code)
    return used


def _codes_of(value: Any) -> Iterator[CodeType]:
    match value:
        case FunctionType():
            yield value.__code__
            yield from _codes_of(getattr(value, "__wrapped__", None))
        case classmethod() | staticmethod():
            yield from _codes_of(value.__func__)
        case property():
            for part in (value.fget, value.fset):
                yield from _codes_of(part)


@functools.cache
def private_members_of_their(base: str) -> frozenset[str]:
    """The members that PyTorch's launching base and its bases have and ours lacks."""
    module = mapping.LAUNCHING_BASES.get(base)
    if module is None:
        return frozenset()
    home = mapping.module_on(mapping.Side.OURS, module)
    assert home is not None
    classes = getattr(importlib.import_module(home), base).__mro__
    theirs = set().union(*(_members_of_their(cls.__name__) for cls in classes))
    ours = set().union(*(_members_of(cls) for cls in classes))
    return frozenset(theirs - ours)


def _members_of_their(base: str) -> set[str]:
    module = mapping.LAUNCHING_BASES.get(base)
    if module is None:
        return set()
    file = mapping.source_of(module, mapping.installed_torch())
    return set() if file is None else _members_in(file, base)


def _members_of(cls: type) -> set[str]:
    """The members of a class of ours or of a base of it, including those of its instances."""
    members = set(vars(cls))
    if cls.__module__ != "builtins":
        members |= _members_in(Path(inspect.getfile(cls)), cls.__name__)
    return members


def _members_in(file: Path, name: str) -> set[str]:
    """The members of a class by its source; none if the file has no such class."""
    node = members_of_classes.find_class(file, name)
    return set() if node is None else members_of_classes.members_of(node)
