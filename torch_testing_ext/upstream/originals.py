"""PyTorch's own modules, in a drop-in run: loaded beside the stand-ins that have their names, and only when needed,
since that takes seconds and may touch the accelerator. What was needed of them is written down for --explain."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

loaded: dict[str, ModuleType] = {}
asked_for: dict[str, set[str]] = {}
# What is done to a module of PyTorch's that was loaded.
after_loading: list[Callable[[ModuleType], None]] = []


def load(name: str) -> ModuleType:
    """PyTorch's module of this name. Raises AttributeError where this torch has none, as for a name that it lacks."""
    if name not in loaded:
        spec = find(name)
        if spec is None or spec.loader is None:
            raise AttributeError(f"this torch has no module {name} to look for it")
        module = loaded[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del loaded[name]
            raise
        for look_at in after_loading:
            look_at(module)
    return loaded[name]


def find(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where it is, whatever has its name in sys.modules."""
    parent = importlib.import_module(name.rpartition(".")[0])
    return importlib.machinery.PathFinder.find_spec(name, parent.__path__)


def note(module: str, name: str) -> None:
    """A name of PyTorch's alone was asked for. What torch asks of itself is nobody's concern."""
    if not _asker().startswith("torch."):
        asked_for.setdefault(module, set()).add(name)


def _asker() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and _name_of(frame.f_globals).startswith(("importlib", __package__)):
        frame = frame.f_back
    return _name_of(frame.f_globals)


def _name_of(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", ""))
