"""Declarations of settings: of variables that reach tests and ranks, and of the options that set them.

The runner and pytest's plugin both derive their options from these. The plugin reads them in every run of pytest, so
this module imports next to nothing.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Level(enum.Enum):
    """The place of an option: each is in the lists of those before it, too."""

    HELP = "--help"
    HELP_ALL = "--help-all"
    # Configuration files, and -o.
    SETTING = "setting"
    # Some commands set it, or have it as an option of theirs.
    OF_COMMANDS = "of commands"


class Setting(Generic[T]):
    """An environment variable that tests and ranks read each time, so that a test may change it."""

    def __init__(self, name: str, values: str | Callable[[], str], parse: Callable[[str], T], default: T):
        """`values`: in words, those that `parse` accepts; it raises ValueError for others."""
        self.name = name
        self._values = values
        self.default = default
        self._parse = parse

    def value(self, environ: Mapping[str, str] = os.environ) -> T:
        """The value in force. An empty text counts as not set. Raises ValueError for an invalid one."""
        text = environ.get(self.name)
        if not text:
            return self.default
        try:
            return self._parse(text)
        except ValueError:
            values = self._values if isinstance(self._values, str) else self._values()
            raise ValueError(f"{self.name}={text!r} is not valid; use {values}") from None


class Option(Generic[T]):
    """An option of the runner, of pytest, or of both."""

    def __init__(
        self,
        field: str,
        group: str,
        read: Callable[[str], T],
        help: str | Callable[[], str] = "",
        metavar: str = "",
        *,
        kind: Any,
        default: Any = None,
        setting: Setting[Any] | None = None,
        pytest_help: str = "",
        apart: Mapping[str, str] = MappingProxyType({}),
        variable: str = "",
        of_variable: Callable[[str], Any] | None = None,
        in_runner: bool = True,
        level: Level = Level.HELP,
        alone: str = "",
        instead: str = "",
        **more: Any,
    ):
        """`field`: its name, with underscores. `group`: its title in --help. `read` raises ValueError.

        `kind`: the type of its values, or a function that returns it. `setting`: the variable by which its value
        reaches ranks. `pytest_help`: pytest has the option, too. `apart`: by name, the options that it cannot be
        combined with, and why. `variable`: one that has the same effect without the runner; `of_variable` reads it.
        `alone`: the value that the flag alone means. `instead`: the option of the runner in its place. `more`:
        further fields of the runner's OptionSpec.
        """
        self.field = field
        self.group = group
        self.read = read
        self.help = help
        self.metavar = metavar
        self.kind = kind
        self.default = default
        self.setting = setting
        self.pytest_help = pytest_help
        self.apart = apart
        self.variable = variable
        self.of_variable = of_variable or read
        self.in_runner = in_runner
        self.level = level
        self.alone = alone
        self.instead = instead
        self.more = more

    @property
    def flag(self) -> str:
        return f"--{self.field.replace('_', '-')}"


class CannotBegin(RuntimeError):
    """A run cannot begin; the message names the option, and says why."""


class AskedOptions:
    """The options of a run, of the runner or of pytest."""

    def value(self, option: Option[T]) -> T:
        """The value that the user has given an option; its default without one."""
        raise NotImplementedError


def variables_of(options: tuple[Option[Any], ...], asked: AskedOptions) -> Iterator[tuple[str, str]]:
    """The variables by which the values of options reach tests and ranks."""
    for option in options:
        value = asked.value(option)
        if option.setting is not None and value is not None and value != option.default:
            yield option.setting.name, "1" if value is True else str(value)


def number(text: str) -> int:
    """Read a number, in the digits of any script."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def words(*known: str) -> Callable[[str], str]:
    """A reader for a value that is one of these words."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return text

    return read


def either(false: str, true: str) -> Callable[[str], bool]:
    """A reader for a value that is one of two words."""
    read = words(false, true)
    return lambda text: read(text) == true
