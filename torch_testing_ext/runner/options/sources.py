"""Options from all sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import layers
from .all_options import OPTION_TABLE, Options
from .command_line import parse_words
from .completing import complete
from .names import setting_name, shown_value


@dataclass(frozen=True)
class ConfiguredOptions:
    """The options in force, and the source of each."""

    options: Options
    # The source of each value, by field.
    sources: Mapping[str, str]
    # A line for each word of the command line that has no effect.
    notes: Sequence[str] = ()


def read_options(
    argv: Sequence[str],
    environ: Mapping[str, str],
    root: Path,
    cwd: Path,
    command: str = "",
    *,
    as_pytorch: bool = False,
) -> ConfiguredOptions:
    """Reads all sources. `root` is the project's folder, which has its configuration files.

    `command`: `show` or the like. `as_pytorch`: -i and -x are those of PyTorch's run_test.py. Raises UsageError; raises
    SystemExit only for --help and --help-all.
    """
    words = parse_words(argv, command, as_pytorch)
    in_order = (
        layers.defaults(root),
        layers.of_pyproject(root),
        layers.of_shared_variables(environ, cwd),
        layers.of_environment(environ, cwd),
        layers.of_command_line(words, cwd),
    )
    values: dict[str, Any] = {}
    sources = {}
    overriding: set[str] = set()
    for layer in in_order:
        # At the end, those of the command line.
        overriding = {field for field, (value, _) in layer.items() if field in values and values[field] != value}
        for field, (value, source) in layer.items():
            values[field] = value
            sources[field] = source
    options = Options(**values, overriding=frozenset(overriding))
    return ConfiguredOptions(complete(options, sources, cwd), sources, words.notes)


def show_options(configured: ConfiguredOptions) -> str:
    """The value and the source of every option, one per line: those that are not the defaults come first."""
    settings = {}
    for field in sorted(OPTION_TABLE, key=lambda field: configured.sources[field] == layers.DEFAULT):
        value = shown_value(getattr(configured.options, field))
        settings[field] = f"{setting_name(field)} = {value}"
    width = max(len(setting) for setting in settings.values())
    lines = [f"{setting:{width}}  ({configured.sources[field]})" for field, setting in settings.items()]
    return "\n".join(lines)
