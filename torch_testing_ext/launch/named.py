"""Classes and functions by name, for processes that may have to import them."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_testing_ext._process import importing
from torch_testing_ext._process.importing import ModulePlace


class UnknownName(Exception):
    """A name that does not exist in this process, or does not mean the same object as in the sender."""


# Keeps modules alive: a module without references loses its globals, and code of it may still be running.
_retired_mains: list[ModuleType] = []


# Every class and function that was ever named, by a unique number that holds in processes forked from this one, too.
# Neither a name nor an id would do: a class defined in a function cannot be found by its name, and another class may
# get the name and the id of one that is gone.
_counter = itertools.count()


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


_things: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Named:
    """A class or function by name, with the file of its module for an interpreter that has not imported it."""

    module: str
    qualname: str
    file: str | None
    number: int
    # The full name of the main module if it was started by `python -m`.
    main: str = ""

    @classmethod
    def of(cls, thing: Any) -> Named:
        number = _numbers.setdefault(thing, next(_counter))
        _things[number] = thing
        module = sys.modules.get(thing.__module__)
        file = getattr(module, "__file__", None)
        absolute = file and str(Path(file).absolute())
        main = ""
        if thing.__module__ == "__main__":
            spec = getattr(module, "__spec__", None)
            main = getattr(spec, "name", "")
        return cls(thing.__module__, thing.__qualname__, absolute, number, main)

    def inherited(self) -> Any:
        """The object itself, in a process forked from the one that named it, if it was named before the fork."""
        try:
            return _things[self.number]
        except KeyError:
            raise UnknownName(f"{self.module}.{self.qualname} was defined after this process was forked") from None

    def look_up(self) -> Any:
        """The object itself, from a module that is already imported."""
        thing: Any = sys.modules.get(self.module)
        for part in self.qualname.split("."):
            thing = getattr(thing, part, None)
        if thing is None:
            raise UnknownName(f"{self.module}.{self.qualname} does not exist in this process")
        return thing

    def resolve(self) -> Any:
        """The object itself, by name; imports its module if necessary."""
        try:
            return self.look_up()
        except UnknownName:
            self.import_module()
            return self.look_up()

    def import_module(self) -> ModuleType:
        """Import the module under its own name, or from its file if the name does not lead to it."""
        if self.module == "__main__":
            return self._import_main()
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and (self.file is None or spec.origin == self.file):
            return importlib.import_module(self.module)
        return self._import_file(self.module)

    def _import_main(self) -> ModuleType:
        # The name __mp_main__ keeps `if __name__ == "__main__"` from running; pickles of the parent refer to __main__.
        _retired_mains.append(sys.modules["__main__"])
        module = self._import_file("__mp_main__", self.main)
        sys.modules["__main__"] = module
        return module

    def _import_file(self, name: str, full_name: str = "") -> ModuleType:
        if self.file is None:
            raise UnknownName(f"module {self.module} has no file to import it from")
        place = ModulePlace.of(self.file)
        if place.name == (full_name or name):
            importing.forget_stdlib_test_package(place)
            importing.import_packages(place)
        try:
            return importing.import_file(name, self.file, full_name=full_name)
        except importing.NoModule as error:
            raise UnknownName(str(error)) from None
