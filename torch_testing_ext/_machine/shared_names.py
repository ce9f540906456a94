"""Constants of PyTorch's test modules that our code reads elsewhere: setting one in the mirror has an effect."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class ComputedNames:
    """Values that are computed each time they are read, until they are set; deleting one computes it again."""

    def __init__(self, **compute: Callable[[], Any]) -> None:
        vars(self)["_compute"] = compute

    def __getattr__(self, name: str) -> Any:
        compute = vars(self)["_compute"]
        if name not in compute:
            raise AttributeError(name)
        return compute[name]()

    def is_set(self, name: str) -> bool:
        return name in vars(self)


def share_names(module: str, holder: Any, *names: str) -> None:
    """Make these names of a module those of `holder`: reading, setting and deleting one in the module does it there."""
    target = sys.modules[module]
    shared = {name: _property(holder, name) for name in names}
    target.__class__ = type("ModuleWithSharedNames", (type(target),), shared)


def _property(holder: Any, name: str) -> property:
    """A property of a module that is the attribute of `holder` with that name."""
    # A plain module has no value to compute again.
    original = vars(holder).get(name)

    def get(_: Any) -> Any:
        return getattr(holder, name)

    def put(_: Any, value: Any) -> None:
        setattr(holder, name, value)

    def delete(_: Any) -> None:
        if isinstance(holder, ModuleType):
            setattr(holder, name, original)
        else:
            delattr(holder, name)

    return property(get, put, delete)
