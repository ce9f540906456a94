"""Jobs: the description of a run, which the parent sends to the process that starts the ranks."""

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

from torch_testing_ext._process import packages
from torch_testing_ext._process.packages import ModulePlace
from torch_testing_ext._process.user_terminal import UserTerminal
from torch_testing_ext._sanitizer.kinds import SanitizeKind

from .account_writer import AccountWriter
from .context import RankContext


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
            packages.forget_stdlib_test_package(place)
            packages.import_packages(place)
        try:
            return packages.import_file(name, self.file, full_name=full_name)
        except packages.NoModule as error:
            raise UnknownName(str(error)) from None


@dataclass(frozen=True)
class ProcessContext:
    """The parent's environment, working directory, sys.path and sys.argv at the time of the launch."""

    environ: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    argv: tuple[str, ...]

    @classmethod
    def here(cls, extra: Mapping[str, str] | None = None) -> ProcessContext:
        return cls({**os.environ, **(extra or {})}, os.getcwd(), tuple(sys.path), tuple(sys.argv))

    def apply(self) -> None:
        """Give this process the same."""
        if os.environ != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        os.chdir(self.cwd)
        for own, wanted in ((sys.path, self.path), (sys.argv, self.argv)):
            if tuple(own) != wanted:
                own[:] = wanted


@dataclass(frozen=True)
class Sanitize:
    """The work of the sanitizer in the ranks of a job; without kinds and seed, there is none."""

    kinds: frozenset[SanitizeKind] = frozenset()
    fails_for_order: bool = False
    # The seed of the delays.
    shake: int | None = None

    def __bool__(self) -> bool:
        return bool(self.kinds) or self.shake is not None

    @property
    def note(self) -> str:
        """Say how to run a test again with the same delays; "" without delays."""
        if self.shake is None:
            return ""
        again = f"--shake-seed {self.shake}, or TORCH_TESTING_EXT_SHAKE={self.shake}"
        return f"The ranks were delayed with the seed {self.shake}; to have the same delays again: {again}"


@dataclass(frozen=True)
class Job:
    """`body(context, **arguments)` in each of `world_size` ranks, or `body(context, subject, **arguments)`."""

    body: Named
    world_size: int
    # Logs, accounts and stacks of the ranks.
    directory: Path
    context: ProcessContext
    # The class of the test.
    subject: Named | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    fast_exit: bool = True
    # The ranks descend from the process that made this job.
    inherits: bool = True
    stream: bool = False
    debug_rank: int | None = None
    # For a rank that stops.
    terminal: UserTerminal = field(default_factory=UserTerminal)
    expects_stops: bool = False
    # The reason of a rank that exits with such a code.
    skips: Mapping[int, str] = field(default_factory=dict)
    # None: as the settings say.
    sanitize: Sanitize | None = None
    # Each rank has a hash seed of its own.
    differs_in_hash: bool = False

    @property
    def names(self) -> tuple[Named, ...]:
        """The things that the process which starts the ranks must know: the subject last, if there is one."""
        return (self.body,) if self.subject is None else (self.body, self.subject)

    def context_of(self, rank: int, account: AccountWriter, inherited: Any = None) -> RankContext:
        return RankContext(
            rank,
            self.world_size,
            self.directory,
            account,
            self.seed,
            self.fast_exit,
            is_debugged=self.debug_rank is not None or self.expects_stops,
            inherited=inherited,
        )

    def call(self, context: RankContext) -> None:
        """Run the body, in a rank."""
        things = [named.inherited() if self.inherits else named.resolve() for named in self.names]
        body, *subject = things
        body(context, *subject, **self.arguments)

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def account(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.account"

    def stacks(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.stacks"

    def recorder(self, rank: int) -> Path:
        """The collectives of the rank when it was asked for them last, by a probe or with its stacks."""
        return self.directory / f"rank{rank}.recorder"

    def in_flight(self, rank: int) -> Path:
        """The account of the exception that was in flight when the rank was asked for its stacks."""
        return self.directory / f"rank{rank}.in_flight"


def log_of(directory: str | Path, rank: int) -> Path:
    """The sanitizer's log of all that a rank issues, if it is sanitized."""
    return Path(directory, f"rank{rank}.sanitizer")
