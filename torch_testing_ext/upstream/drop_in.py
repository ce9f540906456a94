"""PyTorch's module names give ours: for as long as this process lives, and in every rank it starts.

    from torch_testing_ext.upstream import drop_in
    drop_in.install()            # before a test file is imported

Each mirrored module gets a stand-in. A name asked of it is ours where we have it, else PyTorch's own. The stand-ins
stay after the import, since tests import inside functions and patch by name; they are what everybody sees, PyTorch's
other modules included, so that a class of those stands on our bases too. Which of these may, `rebase` decides.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch_testing_ext._cases import invocation
from torch_testing_ext.launch import starting

from . import mapping, members, names, originals, rebase, stricter


def install() -> None:
    """Map PyTorch's names to ours from now on, here and in the interpreters that are started for ranks.

    Imports no torch. To call it again changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    originals.after_loading.append(rebase.settle)
    starting.FIRST_OF_ALL.append(f"from {__name__} import install; install()")
    invocation.verdict_note = stricter.remark
    for pair in mapping.here():
        if pair.theirs in sys.modules:
            _replace(pair)
    for name, module in list(sys.modules.items()):
        if _is_theirs_alone(name):
            rebase.settle(module)


def explain() -> str:
    """What came from PyTorch so far, and whose launch its classes have."""
    lines = [
        f"  {module}: {', '.join(found)}"
        for module, asked in sorted(originals.asked_for.items())
        if (found := _of_the_kit(module, asked))
    ]
    lines = ["Names that came from PyTorch:", *lines] if lines else ["All names that were asked for are ours."]
    return "\n".join([*lines, *rebase.explain()])


def _of_the_kit(module: str, asked: set[str]) -> list[str]:
    """Without what the module has only imported from elsewhere: `import *` asks for that too."""
    kinds = names.defined_in(names.find_source(module))
    return sorted(name for name in asked if kinds.get(name) is not names.NameKind.IMPORTED)


class StandIn(ModuleType):
    """In the place of one of PyTorch's modules. Names with two underscores are its own, all others are looked up."""

    __ours__: str

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [public for public in dir(self) if not public.startswith("_")]
        if _is_own(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        ours = _import_ours(self.__ours__)
        try:
            return getattr(ours, name)
        except AttributeError:
            pass
        found = getattr(originals.load(self.__name__), name)
        originals.note(self.__name__, name)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_own(name):
            super().__setattr__(name, value)
            return
        for holder in _holders(self, name):
            setattr(holder, name, value)

    def __delattr__(self, name: str) -> None:
        for holder in _holders(self, name):
            delattr(holder, name)

    def __dir__(self) -> list[str]:
        return sorted(name for name in dir(originals.load(self.__name__)) if not _is_own(name))

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """What mock.patch and dataclasses look into. PyTorch's names only where its module is loaded already."""
        theirs = originals.loaded.get(self.__name__)
        return {**(vars(theirs) if theirs else {}), **vars(_import_ours(self.__ours__))}


def _holders(stand_in: StandIn, name: str) -> list[ModuleType]:
    """Where the code that looks this name up finds it: a patch must change what that code sees. Our modules hand names
    on to each other, and PyTorch has them in one."""
    ours = _import_ours(stand_in.__ours__)
    if not hasattr(ours, name):
        return [originals.load(stand_in.__name__)]
    value = getattr(ours, name)
    kit = [module for key, module in sys.modules.items() if key.startswith(f"{mapping.OUR_KIT}.")]
    return [module for module in kit if module is ours or vars(module).get(name, kit) is value]


def _is_own(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _import_ours(name: str) -> ModuleType:
    module = importlib.import_module(name)
    if hasattr(module, "TestCase"):
        members.lend(module.TestCase)
    return module


def _make(name: str, ours: str) -> StandIn:
    stand_in = StandIn(name)
    stand_in.__ours__ = ours
    return stand_in


def _replace(pair: mapping.Mirrored) -> None:
    """The module is imported already: who has it keeps it, who imports it from now on gets the stand-in."""
    module = originals.loaded[pair.theirs] = sys.modules[pair.theirs]
    stand_in = _make(pair.theirs, pair.ours)
    for name in ("__file__", "__spec__", "__package__", "__loader__"):
        setattr(stand_in, name, getattr(module, name, None))
    sys.modules[pair.theirs] = stand_in
    parent, _, child = pair.theirs.rpartition(".")
    setattr(sys.modules[parent], child, stand_in)
    rebase.settle(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Asked before all others: for mirrored modules it has stand-ins, in PyTorch's others it looks at the classes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        ours = mapping.module_on(mapping.Side.OURS, fullname)
        if ours is None and not _is_theirs_alone(fullname):
            return None
        real = importlib.machinery.PathFinder.find_spec(fullname, path)
        if ours is not None:
            spec = importlib.machinery.ModuleSpec(fullname, _StandInLoader(ours), origin=real.origin if real else None)
            spec.has_location = real is not None
            return spec
        if real is not None and real.loader is not None:
            real.loader = _SettlingLoader(real.loader)
        return real


class _StandInLoader(importlib.abc.Loader):
    def __init__(self, ours: str):
        self._ours = ours

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _make(spec.name, self._ours)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run: names are looked up when they are asked for."""


class _SettlingLoader(importlib.abc.Loader):
    """The real loader; afterwards the module's classes are seen to."""

    def __init__(self, real: Any):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        rebase.settle(module)


def _is_theirs_alone(name: str) -> bool:
    below = name.startswith(f"{mapping.THEIR_KIT}.") and mapping.module_on(mapping.Side.OURS, name) is None
    return below or name in mapping.OTHER_TEST_BASES
