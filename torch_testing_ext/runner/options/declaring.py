"""The declaration of an option: all that the command line, its help and the configuration know of it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_testing_ext._process.setting_readers import read_boolean


class Level(enum.Enum):
    """The place of an option: each is in the lists of those before it, too."""

    HELP = "--help"
    HELP_ALL = "--help-all"
    # Configuration files, and -o.
    SETTING = "setting"
    # Some commands set it, or have it as an option of theirs.
    OF_COMMANDS = "of commands"


@dataclass(frozen=True)
class ValueFlag:
    """A flag that sets an option to one of its values."""

    names: tuple[str, ...]
    value: Any
    help: str


@dataclass(frozen=True)
class OptionSpec:
    """One option, as it is written on the command line and in the configuration."""

    group: str
    read: Callable[[str], Any]
    help: str = ""
    metavar: str = ""
    level: Level = Level.HELP
    # The option may be given several times.
    many: bool = False
    values: tuple[ValueFlag, ...] = ()
    # Also in configuration files and the environment.
    configurable: bool = True
    # The value that the flag alone means.
    alone: str = ""
    # Flags beside the one that is named after the field.
    also: tuple[str, ...] = ()
    # Flags of run_test.py: as in PyTorch's, each takes several values.
    of_pytorch: tuple[str, ...] = ()
    # The option without which this one means nothing.
    needs: str = ""
    # In the command that runs a test again.
    in_command: bool = False
    # All of them, unless it is an argument without a flag or has only flags for its values.
    flags: tuple[str, ...] = ()


_SPEC = "spec"


class OptionGroup:
    """A group of options in --help. Called, it makes the metadata of a field that is an option."""

    def __init__(self, title: str):
        self._title = title

    def __call__(
        self, read: Callable[[str], Any], help: str = "", metavar: str = "", level: Level = Level.HELP, **more: Any
    ) -> dict[str, OptionSpec]:
        return {_SPEC: OptionSpec(self._title, read, help, metavar, level, **more)}


def specs_of(options: type[Any]) -> dict[str, OptionSpec]:
    """The options that a dataclass declares, by field, with their flags."""
    table = {}
    for field in dataclasses.fields(options):
        spec: OptionSpec = field.metadata[_SPEC]
        is_flag = spec.read is read_boolean or spec.metavar
        if is_flag and spec.level is not Level.OF_COMMANDS and field.name != "names":
            flags = (f"--{field.name.replace('_', '-')}", *spec.also)
            spec = dataclasses.replace(spec, flags=tuple(sorted(flags, key=lambda flag: flag.startswith("--"))))
        table[field.name] = spec
    return table
