"""Constants of PyTorch's test modules that our code reads elsewhere: setting one in the mirror must have an effect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class ComputedNames:
    """Values that are computed each time they are read, until they are set; deleting one computes it again."""

    def __init__(self, **compute: Callable[[], Any]) -> None:
        vars(self)["_compute"] = compute

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self)["_compute"]:
            raise AttributeError(name)
        return vars(self)["_compute"][name]()

    def is_set(self, name: str) -> bool:
        return name in vars(self)


def share(module: str, holder: Any, *names: str) -> None:
    """Make these names of a module those of `holder`: reading, setting and deleting one in the module does it there."""
    found = sys.modules[module]
    shared = {name: _property(holder, name) for name in names}
    found.__class__ = type("ModuleWithSharedNames", (type(found),), shared)


def _property(holder: Any, name: str) -> property:
    original = vars(holder).get(name)  # a plain module has no value to compute again

    def delete(_: Any) -> None:
        if isinstance(holder, ModuleType):
            setattr(holder, name, original)
        else:
            delattr(holder, name)

    return property(lambda _: getattr(holder, name), lambda _, value: setattr(holder, name, value), delete)
