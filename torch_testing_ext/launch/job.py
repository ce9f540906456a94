"""What is to be run in the ranks: data that crosses from the parent to the process that starts them."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

__rank_frame__ = True


class UnknownName(Exception):
    """A name that means nothing here, or something else than it means to the sender."""


# A module that nobody refers to loses its globals, and code of it may still be running.
_retired_mains: list[ModuleType] = []


# Every class and function that was ever named, by a number of its own: a process forked off this one has the same.
# Neither a name nor an id would do: a class made in a function has no name to find it by, and one that is gone may
# leave both to another.
_counter = itertools.count()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_things: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Named:
    """A class or function by its name, and where its module can be found by an interpreter that has not got it."""

    module: str
    qualname: str
    file: str | None
    number: int

    @classmethod
    def of(cls, thing: Any) -> Named:
        number = _numbers.setdefault(thing, next(_counter))
        _things[number] = thing
        module = sys.modules.get(thing.__module__)
        file = getattr(module, "__file__", None)
        return cls(thing.__module__, thing.__qualname__, file and str(Path(file).absolute()), number)

    def inherited(self) -> Any:
        """The thing itself, in a process forked off the one that named it, if it was named before the fork."""
        try:
            return _things[self.number]
        except KeyError:
            raise UnknownName(f"{self.module}.{self.qualname} came later than this process") from None

    def look_up(self) -> Any:
        """The thing itself, from a module that is already imported."""
        found: Any = sys.modules.get(self.module)
        for part in self.qualname.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise UnknownName(f"{self.module}.{self.qualname} is not there")
        return found

    def resolve(self) -> Any:
        """The thing itself, by its name, its module imported if need be."""
        try:
            return self.look_up()
        except UnknownName:
            self.import_module()
            return self.look_up()

    def import_module(self) -> ModuleType:
        """Import the module under its own name: from the file where the name does not lead to it."""
        if self.module == "__main__":
            return self._import_main()
        try:
            found = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            found = None
        if found is not None and (self.file is None or found.origin == self.file):
            return importlib.import_module(self.module)
        return self._import_file(self.module)

    def _import_main(self) -> ModuleType:
        # The name keeps `if __name__ == "__main__"` from running; pickles made in the parent say __main__.
        _retired_mains.append(sys.modules["__main__"])
        module = self._import_file("__mp_main__")
        sys.modules["__main__"] = module
        return module

    def _import_file(self, name: str) -> ModuleType:
        if self.file is None:
            raise UnknownName(f"module {self.module} has no file to import it from")
        spec = importlib.util.spec_from_file_location(name, self.file)
        if spec is None or spec.loader is None:
            raise UnknownName(f"{self.file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


@dataclass(frozen=True)
class ProcessContext:
    """What an interpreter has around it that a test may look at, as the parent has it at the moment of launch."""

    environ: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    argv: tuple[str, ...]

    @classmethod
    def here(cls, extra: Mapping[str, str] | None = None) -> ProcessContext:
        return cls({**os.environ, **(extra or {})}, os.getcwd(), tuple(sys.path), tuple(sys.argv))

    def apply(self) -> None:
        """Make those of this process the same."""
        if os.environ != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        os.chdir(self.cwd)
        for here, there in ((sys.path, self.path), (sys.argv, self.argv)):
            if tuple(here) != there:
                here[:] = there


@dataclass(frozen=True)
class Job:
    """`body(subject, rank, report, **arguments)` in each of `world_size` ranks."""

    body: Named
    subject: Named
    world_size: int
    directory: Path  # logs, accounts and stacks of the ranks
    context: ProcessContext
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inherits: bool = True  # the ranks descend from the process that made this
    stream: bool = False
    debug_rank: int | None = None

    def call(self, *arguments: Any) -> None:
        """Do it, in a rank."""
        find = Named.inherited if self.inherits else Named.resolve
        find(self.body)(find(self.subject), *arguments, **self.arguments)

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def account(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.account"

    def stacks(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.stacks"

    def recorder(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.recorder"
