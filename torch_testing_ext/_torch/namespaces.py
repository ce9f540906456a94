"""Whether modules, their classes and their tables are as they were: nothing in them was replaced, added or removed."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

_MISSING = object()
# Where CPython keeps a number that changes whenever a dict does: since 3.6, until 3.13.
_VERSION_AT = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)


def _version_of(namespace: dict[Any, Any]) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(id(namespace) + _VERSION_AT)


def _has_versions() -> bool:
    """Does that number change with a dict, and only then?"""
    if sys.implementation.name != "cpython" or object.__basicsize__ + 24 > {}.__sizeof__():
        return False
    tried: dict[str, object] = {"first": 0}
    version, seen = _version_of(tried), []
    for name, value in (("first", 1), ("second", 2), ("first", 3)):
        seen.append(version.value)
        if version.value != seen[-1]:
            return False
        tried[name] = value
    return len({*seen, version.value}) == 4


HAS_VERSIONS = _has_versions()


class Namespaces:
    """Remembers what is in modules and their classes, and in the dicts that these have, two levels deep.

    A change of a list or a set, or of the code of a function, is not noticed. A module that appears in a module is no
    change: it was imported.
    """

    def __init__(
        self, modules: Iterable[str], packages: Iterable[str], ignored: Iterable[str] = (), caches: Iterable[Any] = ()
    ):
        """`packages`: modules with all that are below them. Modules that are not imported do not count.

        `ignored`: names whose values never count; `caches`: dicts whose entries never count.
        """
        self._ignored = _BY_PYTHON.union(ignored)
        self._modules, self._packages = frozenset(modules), tuple(packages)
        self._volatile: dict[int, set[Any]] = {}  # by id of a namespace: what changes in it by itself
        self._caches: dict[int, dict[Any, Any]] = {id(one): one for one in caches}
        self.remember()

    def remember(self) -> None:
        """From now on, compare with what there is now."""
        self._imported = len(sys.modules)
        # By id; kept alive, so that no id is used again.
        self._dicts = {id(found): found for found in self._find() if id(found) not in self._caches}
        self._then = {number: dict(found) for number, found in self._dicts.items()}
        self._versions = [_version_of(found) for found in self._dicts.values()] if HAS_VERSIONS else []
        self._seen = [version.value for version in self._versions]

    def ignore_changes(self) -> None:
        """What has changed since `remember` changes by itself, such as a cache or a counter, and never counts again.

        If something was imported meanwhile, that has changed it.
        """
        changed = {number: set(self._changed_in(number)) for number in self._touched()}
        if len(sys.modules) == self._imported:
            for number, names in changed.items():
                if names and not self._is_table(number):
                    self._volatile.setdefault(number, set()).update(names)
                elif names:
                    self._caches[number] = self._dicts[number]
        if changed:
            self.remember()

    def _is_table(self, number: int) -> bool:
        """Is this dict neither a module's nor a class's?"""
        return not {"__module__", "__name__"} & self._dicts[number].keys()

    def have_changed(self) -> bool:
        """Takes microseconds, and writes to no memory, as long as nothing has changed."""
        if HAS_VERSIONS and [version.value for version in self._versions] == self._seen:
            return False
        if any(True for number in self._touched() for _ in self._changed_in(number)):
            return True
        self._seen = [version.value for version in self._versions]
        return False

    def _touched(self) -> list[int]:
        """The dicts that may have changed."""
        if not HAS_VERSIONS:
            return [*self._dicts]
        now = [version.value for version in self._versions]
        return [number for number, old, new in zip(self._dicts, self._seen, now, strict=True) if old != new]

    def _changed_in(self, number: int) -> Iterator[Any]:
        then, now = self._then[number], self._dicts[number]
        volatile = self._volatile.get(number, ())
        for name, value in now.items():
            before = then.get(name, _MISSING)
            if before is value or name in volatile or name in self._ignored:
                continue
            if before is not _MISSING or not isinstance(value, ModuleType):
                yield name
        yield from (name for name in then if name not in now and name not in volatile)

    def _find(self) -> Iterator[dict[Any, Any]]:
        for name, module in tuple(sys.modules.items()):
            if isinstance(module, ModuleType) and self._is_meant(name):
                yield from _dicts_of(vars(module), name)

    def _is_meant(self, name: str) -> bool:
        return name in self._modules or any(name == one or name.startswith(f"{one}.") for one in self._packages)


# What Python itself puts into classes when it copies or pickles their objects, and into modules when it warns.
_BY_PYTHON = frozenset({"__slotnames__", "__warningregistry__"})


def _dicts_of(module: dict[str, Any], name: str) -> Iterator[dict[Any, Any]]:
    yield module
    for value in tuple(module.values()):
        if isinstance(value, type):
            if value.__module__ == name:
                namespace = _namespace_of(value)
                yield namespace
                for inner in tuple(namespace.values()):
                    if isinstance(inner, dict):
                        yield inner
        elif isinstance(value, dict) and value is not module.get("__builtins__"):
            yield value
            yield from (inner for inner in tuple(value.values()) if isinstance(inner, dict))


def _namespace_of(cls: type) -> dict[str, Any]:
    """The dict itself of a class, whose `__dict__` is only a view of it."""
    view: Mapping[str, Any] = vars(cls)
    namespace: dict[str, Any]
    (namespace,) = gc.get_referents(view)
    return namespace
