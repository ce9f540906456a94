"""From what a user wrote to Options: default < setup.cfg < pyproject.toml < environment < command line.

Whatever is misspelt, anywhere, is an error that names the place and the nearest known names.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .options import Options, UsageError
from .suggestions import nearest
from .table import OPTION_TABLE, OptionSpec, truth

SECTION = "torch_testing_ext"
# launch/settings.py leaves these to us. It is not asked for the name: that would import all of launch/ for --help.
PREFIX = "TORCH_TESTING_EXT_RUN_"
DEFAULT = "default"
COMMAND_LINE = "command line"
EXIT_CODES = """\
exit codes: 0 all passed; 1 failures; 2 interrupted; 3 an error of our own; 4 this was not understood;
5 nothing selected; 6 all that was selected was skipped for want of devices"""


@dataclass(frozen=True)
class Layer:
    """What one place says: for each field the value, and where exactly it stands."""

    values: Mapping[str, Any]
    places: Mapping[str, str]


@dataclass(frozen=True)
class ConfiguredOptions:
    options: Options
    places: Mapping[str, str]  # of each field: where its value comes from


def choose(argv: Sequence[str], environ: Mapping[str, str], root: Path, here: Path) -> ConfiguredOptions:
    """`root` is the project's folder, where its files of configuration are; `here` is where the user stands.

    Raises UsageError; leaves by SystemExit for --help alone.
    """
    layers = (
        _defaults(root),
        _setup_cfg(root),
        _pyproject(root),
        _environment(environ, here),
        _command_line(argv, here),
    )
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for layer in layers:
        values.update(layer.values)
        places.update(layer.places)
    return ConfiguredOptions(_settle(Options(**values), places), places)


def _settle(options: Options, places: Mapping[str, str]) -> Options:
    if options.gpus is not None and options.fake_gpus is not None:
        raise UsageError("--gpus and --fake-gpus exclude each other: devices are either real or not")
    if options.drop_in is not None:
        options = _dropped_in(options, options.drop_in.resolve(), places)
    return dataclasses.replace(options, shuffle=options.shuffle or options.seed is not None)


def _dropped_in(options: Options, path: Path, places: Mapping[str, str]) -> Options:
    """A checkout's tests, unless told otherwise, or those of a file or folder; what is remembered of them is apart, as
    our tests may have the same names."""
    whole = (path / "test").is_dir()
    tests = _resolved(Options().tests, path) if whole else (path,)
    return dataclasses.replace(
        options,
        drop_in=path if whole else _root_of(path),
        names=options.names if whole else (str(path), *options.names),
        tests=tests if places["tests"] == DEFAULT else options.tests,
        cache=options.cache / "drop_in" if places["cache"] == DEFAULT else options.cache,
    )


def _root_of(path: Path) -> Path:
    """The checkout that a test file or a folder of tests is in; else where it lies."""
    inside = next((folder.parent for folder in path.parents if folder.name == "test"), None)
    return inside or (path if path.is_dir() else path.parent)


def show(chosen: ConfiguredOptions) -> str:
    """What is in force, and from where."""
    lines = []
    for field in OPTION_TABLE:
        lines.append((f"{field} = {_shown(getattr(chosen.options, field))}", chosen.places[field]))
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:{width}}  ({place})" for text, place in lines)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_shown(one) for one in value) or "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    return "(none)" if value is None else str(getattr(value, "value", value))


# -- layers


def _defaults(root: Path) -> Layer:
    options = Options()
    values = {field: _resolved(getattr(options, field), root) for field in OPTION_TABLE}
    return Layer(values, dict.fromkeys(values, DEFAULT))


def _setup_cfg(root: Path) -> Layer:
    file = root / "setup.cfg"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(file, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    section = dict(parser[SECTION]) if parser.has_section(SECTION) else {}
    return _from_file(section, file, root)


def _pyproject(root: Path) -> Layer:
    file = root / "pyproject.toml"
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if f"tool.{SECTION}" not in text:
        return Layer({}, {})
    toml = _toml_reader(file)
    try:
        section = toml.loads(text).get("tool", {}).get(SECTION, {})
    except toml.TOMLDecodeError as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    return _from_file({key: _as_text(value) for key, value in section.items()}, file, root)


def _toml_reader(file: Path) -> ModuleType:
    for name in ("tomllib", "tomli"):  # the first since Python 3.11, the second where somebody has installed it
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    version = ".".join(map(str, sys.version_info[:2]))
    raise UsageError(
        f"{file} names {SECTION}, but Python {version} cannot read it. Install tomli, or move what is said there "
        f"to the section [{SECTION}] of setup.cfg, which every Python reads."
    )


def _as_text(value: Any) -> str:
    """TOML has types where an INI file has text: lists become lines, so that both are read in one way."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_file(section: Mapping[str, str], file: Path, root: Path) -> Layer:
    known = {field.replace("_", "-"): field for field, switch in OPTION_TABLE.items() if switch.configurable}
    values = {}
    for key, text in section.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"{file}: {key} is not an option of [{SECTION}].{nearest(name, known)}")
        values[known[name]] = _read(known[name], text, f"{file}: {key}", root)
    return Layer(values, dict.fromkeys(values, file.name))


def _environment(environ: Mapping[str, str], here: Path) -> Layer:
    known = {PREFIX + field.upper(): field for field, switch in OPTION_TABLE.items() if switch.configurable}
    values, places = {}, {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or not text:
            continue
        if name not in known:
            raise UsageError(f"{name} is not a variable of run_test.py.{nearest(name, known)}")
        values[known[name]] = _read(known[name], text, name, here)
        places[known[name]] = name
    return Layer(values, places)


def _read(field: str, text: str, place: str, base: Path) -> Any:
    switch = OPTION_TABLE[field]
    texts = [line.strip() for line in text.splitlines() if line.strip()] if switch.many else [text.strip()]
    try:
        values = tuple(switch.read(one) for one in texts)
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from None
    return _resolved(values if switch.many else values[0], base)


def _resolved(value: Any, base: Path) -> Any:
    """A path is meant as seen from where it is written."""
    if isinstance(value, tuple) and value and isinstance(value[0], Path):
        return tuple(base / one for one in value)
    return base / value if isinstance(value, Path) else value


# -- the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists all options)")


def _command_line(argv: Sequence[str], here: Path) -> Layer:
    given, unknown = _parser().parse_known_intermixed_args(list(argv))
    if unknown:
        raise UsageError(f"{unknown[0]} is not an option.{nearest(unknown[0], _flags())} (--help lists all options)")
    values = {field: _resolved(_frozen(value), here) for field, value in vars(given).items()}
    return Layer(values, dict.fromkeys(values, COMMAND_LINE))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _flags() -> list[str]:
    return [name for field, switch in OPTION_TABLE.items() for names, _ in _arguments(field, switch) for name in names]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="run_test.py",
        description="Run distributed tests over the devices and cores at hand.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field, switch in OPTION_TABLE.items():
        for names, more in _arguments(field, switch):
            parser.add_argument(*names, **more)
    return parser


def _arguments(field: str, switch: OptionSpec) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """How a field is told to argparse."""
    for flag in switch.values:
        yield flag.names, {"dest": field, "action": "store_const", "const": flag.value, "help": flag.help}
    if switch.read is truth:
        yield switch.flags, {"dest": field, "action": argparse.BooleanOptionalAction, "help": switch.help}
    elif not switch.values:
        yield (switch.flags or (field,)), {**_valued(field, switch), "metavar": switch.metavar, "help": switch.help}


def _valued(field: str, switch: OptionSpec) -> dict[str, Any]:
    valued: dict[str, Any] = {"type": _type_of(switch)}
    if not switch.flags:
        return {**valued, "nargs": "*"}
    if switch.many:
        valued.update({"action": "extend", "nargs": "+"} if switch.several else {"action": "append"})
    return {**valued, "dest": field}


def _type_of(switch: OptionSpec) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return switch.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
