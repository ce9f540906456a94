"""The declaration of an option: all that the command line, its help and the configuration know of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch_testing_ext._process.declarations import Level as Level, Option
from torch_testing_ext._process.setting_readers import read_boolean


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
    # Whether configuration files and the environment may set it, too.
    configurable: bool = True
    # The value that the flag alone means.
    alone: str = ""
    # Flags beside the one that is named after the field.
    also: tuple[str, ...] = ()
    # Flags of run_test.py: as in PyTorch's, each takes several values.
    of_pytorch: tuple[str, ...] = ()
    # The option without which this one means nothing.
    needs: str = ""
    # Whether it may change how a test ends: then it is in the command that runs the test again.
    in_command: bool = True
    # The text that `read` reads as a value, where it is not the one that is shown.
    write: Callable[[Any], str] | None = None
    # The options that exclude it, by field, with the reason.
    apart: Mapping[str, str] = field(default_factory=dict)
    # A variable that has the same effect without the runner, and how to read it.
    variable: str = ""
    of_variable: Callable[[str], Any] | None = None
    # All of them, unless it is an argument without a flag or has only flags for its values.
    flags: tuple[str, ...] = ()


_SPEC = "spec"
T = TypeVar("T")


class OptionGroup:
    """A group of options in --help. Called, it makes the field of an option."""

    def __init__(self, title: str, in_command: bool = True):
        """`in_command`: of options that do not say otherwise."""
        self._title = title
        self._in_command = in_command

    def __call__(self, default: T, *spec: Any, **more: Any) -> T:
        """A field with this default. For the other arguments, see `metadata`."""
        made: T = field(default=default, metadata=self.metadata(*spec, **more))
        return made

    def metadata(
        self, read: Callable[[str], Any], help: str = "", metavar: str = "", level: Level = Level.HELP, **more: Any
    ) -> dict[str, OptionSpec]:
        return {_SPEC: OptionSpec(self._title, read, help, metavar, level, **{"in_command": self._in_command, **more})}


def declared_by(options: Iterator[Option[Any]]) -> list[tuple[str, Any, Any]]:
    """The fields of a dataclass, as `make_dataclass` wants them, for options that aspects declare."""
    fields = []
    for option in options:
        kind = option.kind() if inspect.isfunction(option.kind) else option.kind
        fields.append((option.field, kind, field(default=option.default, metadata={_SPEC: _spec_of(option)})))
    return fields


def _spec_of(option: Option[Any]) -> OptionSpec:
    return OptionSpec(
        option.group,
        option.read,
        option.help if isinstance(option.help, str) else option.help(),
        option.metavar,
        option.level,
        alone=option.alone,
        apart=option.apart,
        variable=option.variable,
        of_variable=option.of_variable,
        **option.more,
    )


def specs_of(options: type[Any], own: type[Any], last_groups: str) -> dict[str, OptionSpec]:
    """The options that a dataclass declares, by field, with their flags, in the order of their groups.

    `own`: the class with those of the runner. Groups that it has not come before its group `last_groups`.
    """
    table = {}
    for each in dataclasses.fields(options):
        if _SPEC not in each.metadata:
            continue
        spec: OptionSpec = each.metadata[_SPEC]
        is_flag = spec.read is read_boolean or (spec.metavar and spec.level is not Level.OF_COMMANDS)
        if is_flag and each.name != "names":
            flags = (f"--{each.name.replace('_', '-')}", *spec.also)
            spec = dataclasses.replace(spec, flags=tuple(sorted(flags, key=lambda flag: flag.startswith("--"))))
        table[each.name] = spec
    groups = list(dict.fromkeys(table[each.name].group for each in dataclasses.fields(own) if each.name in table))
    before = groups.index(last_groups)
    others = [group for group in dict.fromkeys(spec.group for spec in table.values()) if group not in groups]
    order = [*groups[:before], *others, *groups[before:]]
    return dict(sorted(table.items(), key=lambda item: order.index(item[1].group)))
