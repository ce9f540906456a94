"""The layers of options: defaults, pyproject.toml, the environment, the command line.

A misspelt name is an error, in every layer; the message names its source and the nearest known names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_testing_ext._process import project_settings
from torch_testing_ext._process.project_settings import RUNNER_PREFIX as PREFIX, SECTION
from torch_testing_ext._process.words import nearest

from .all_options import OPTION_TABLE, Options
from .command_line import ParsedWords
from .names import setting_name, written_name
from .values import UsageError

DEFAULT = "default"
COMMAND_LINE = "command line"
# The options that one source sets: by field, the value and its exact source.
Layer = dict[str, tuple[Any, str]]


def defaults(root: Path) -> Layer:
    options = Options()
    return {field: (_resolved(getattr(options, field), root), DEFAULT) for field in OPTION_TABLE}


def of_pyproject(root: Path) -> Layer:
    # As an INI file would have them, so that both formats are read in the same way.
    settings = _flat(pyproject_section(root) or {})
    texts = {key: _list(key, value) if isinstance(value, list) else str(value) for key, value in settings.items()}
    return _from_file(texts, root / "pyproject.toml", root)


def _list(key: str, items: list[Any]) -> str:
    """A list in an INI file: a line for each item, or commas between them where the option has one value."""
    spec = OPTION_TABLE.get(re.sub("[-.]", "_", key))
    if spec is None or spec.many:
        return "\n".join(map(str, items))
    # The name of a single GPU would be a number of them.
    return ",".join(map(str, items)) + ("," if key == "gpus" else "")


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of [tool.torch_testing_ext], and with their prefix those of its tables."""
    settings = {}
    for key, value in section.items():
        if not isinstance(value, dict):
            settings[key] = value
            continue
        for name, item in value.items():
            settings[key if name == "address" else f"{key}.{name}"] = item
    return settings


def pyproject_section(root: Path) -> dict[str, Any] | None:
    """The settings in the file, if it has any. Raises UsageError."""
    try:
        return project_settings.pyproject_section(root)
    except project_settings.SettingsError as error:
        raise UsageError(str(error)) from None


def _from_file(section: Mapping[str, str], file: Path, root: Path) -> Layer:
    layer = {}
    for key, text in section.items():
        field = _known_field(key, f"{file}:")
        layer[field] = _read(field, text, f"{file}: {key}", root), file.name
    return layer


def _known_field(key: str, source: str) -> str:
    """The option that a setting is of. Raises UsageError."""
    known = {setting_name(field): field for field, spec in OPTION_TABLE.items() if spec.configurable}
    # `cluster-nodes` is cluster.nodes, too.
    field = re.sub("[-.]", "_", key)
    name = setting_name(field)
    if name in known:
        return field
    message = f"{source} {key} is not a setting of [tool.{SECTION}]"
    if field in OPTION_TABLE:
        flag = written_name(field)
        raise UsageError(f"{message}, since {flag} is for one run: write it on the command line")
    if source == "-o":
        # A name that pytest has is no misspelt one of ours.
        raise UsageError(f"{message}.{nearest(name, known)} For one of pytest, write -- -o {key}=VALUE")
    raise UsageError(f"{message}.{nearest(name, known)}")


def of_environment(environ: Mapping[str, str], cwd: Path) -> Layer:
    known = {PREFIX + field.upper(): field for field, spec in OPTION_TABLE.items() if spec.configurable}
    layer = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or not text:
            continue
        if name not in known:
            raise UsageError(f"{name} is not a variable of the runner.{nearest(name, known)}")
        field = known[name]
        layer[field] = _read(field, text, name, cwd), name
    return layer


def of_shared_variables(environ: Mapping[str, str], cwd: Path) -> Layer:
    """The options with a variable that has the same effect with the runner and without."""
    layer: Layer = {}
    for field, spec in OPTION_TABLE.items():
        if spec.variable and environ.get(spec.variable):
            layer[field] = _read(field, environ[spec.variable], spec.variable, cwd, spec.of_variable), spec.variable
    return layer


def _read(field: str, text: str, source: str, base: Path, read: Callable[[str], Any] | None = None) -> Any:
    spec = OPTION_TABLE[field]
    read = read or spec.read
    texts = [text.strip()]
    if spec.many:
        lines = [line.strip() for line in text.splitlines()]
        texts = [line for line in lines if line]
    try:
        values = tuple(read(item) for item in texts)
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    return _resolved(values if spec.many else values[0], base)


def _resolved(value: Any, base: Path) -> Any:
    """A path is relative to the place where it is written: a file's folder, or the working directory."""
    if isinstance(value, Path):
        return base / value
    if isinstance(value, tuple) and value and isinstance(value[0], Path):
        return tuple(base / path for path in value)
    return value


def of_command_line(words: ParsedWords, cwd: Path) -> Layer:
    """The options of the command line, and the settings that -o changes."""
    texts: dict[str, str] = {}
    for name, text in words.overrides:
        field = _known_field(name, "-o")
        # A list has a line for each of its items.
        before = f"{texts[field]}\n" if field in texts and OPTION_TABLE[field].many else ""
        texts[field] = before + text
    layer = {}
    for field, text in texts.items():
        layer[field] = _read(field, text, f"-o {setting_name(field)}", cwd), COMMAND_LINE
    for field, value in words.values.items():
        layer[field] = _resolved(value, cwd), COMMAND_LINE
    return layer
