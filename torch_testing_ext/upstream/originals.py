"""PyTorch's own modules in a drop-in run, loaded next to their stand-ins.

A module is loaded only when one of its names is needed, since loading takes seconds and may touch the accelerator.
The names that were needed are recorded for --explain.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

loaded: dict[str, ModuleType] = {}
originals_requested: dict[str, set[str]] = {}
# Called with each module of PyTorch's that was loaded.
after_loading: list[Callable[[ModuleType], None]] = []


def load_original(name: str) -> ModuleType:
    """PyTorch's module of this name. If this torch has none, raises AttributeError, as for a missing name."""
    if name not in loaded:
        parent = importlib.import_module(name.rpartition(".")[0])
        # Whatever sys.modules has.
        spec = importlib.machinery.PathFinder.find_spec(name, parent.__path__)
        if spec is None or spec.loader is None:
            raise AttributeError(f"this torch has no module {name} in which to look for it")
        module = loaded[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del loaded[name]
            raise
        for callback in after_loading:
            callback(module)
    return loaded[name]


def record_original(module: str, name: str) -> None:
    """Record that a name was taken from PyTorch, unless torch itself asked for it."""
    if not _caller().startswith("torch."):
        originals_requested.setdefault(module, set()).add(name)


def _caller() -> str:
    """The module that looks the name up: the first outside this package and importlib."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _name_of(frame.f_globals).startswith(("importlib", __package__)):
        frame = frame.f_back
    return _name_of(frame.f_globals)


def _name_of(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", ""))
