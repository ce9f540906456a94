"""Reads Options from all sources: default < setup.cfg < pyproject.toml < environment < command line.

A misspelt name is an error, in every source; the message names the source and the nearest known names.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch_testing_ext._machine.sharing import RANKS_PER_GPU, ranks_per_device

from .options import ALL_CPUS, Options, UsageError, is_checkout, nearest, program
from .table import OPTION_GROUPS, OPTION_TABLE, OptionSpec, boolean

SECTION = "torch_testing_ext"
# The same as launch/settings.py's RUNNER_PREFIX, which is not imported here: --help would import all of launch/.
PREFIX = "TORCH_TESTING_EXT_RUN_"
DEFAULT = "default"
COMMAND_LINE = "command line"
Layer = dict[str, tuple[Any, str]]  # the options that one source sets: by field, the value and its exact source
EXIT_CODES = """\
reports of an earlier run, also of one that was killed:
  run_test.py report [JOURNAL] [--junit FILE] [--html FILE] [--trace FILE] [--results FILE]

exit codes:
  0  no test failed
  1  at least one test failed
  2  the run was interrupted
  3  internal error of run_test.py
  4  usage error: nothing was run
  5  nothing was selected
  6  everything selected was skipped: not enough devices"""


@dataclass(frozen=True)
class ConfiguredOptions:
    """The options in force, and the source of each."""

    options: Options
    sources: Mapping[str, str]  # by field


def read_options(argv: Sequence[str], environ: Mapping[str, str], root: Path, cwd: Path) -> ConfiguredOptions:
    """Reads all sources. `root` is the project's folder, which has its configuration files.

    Raises UsageError; raises SystemExit only for --help.
    """
    layers = (
        _defaults(root),
        _setup_cfg(root),
        _pyproject(root),
        _shared_with_python(environ),
        _environment(environ, cwd),
        _command_line(argv, cwd),
    )
    found = {field: setting for layer in layers for field, setting in layer.items()}
    values = {field: value for field, (value, _) in found.items()}
    sources = {field: source for field, (_, source) in found.items()}
    return ConfiguredOptions(_complete(Options(**values), sources, cwd), sources)


def _complete(options: Options, sources: Mapping[str, str], cwd: Path) -> Options:
    if options.gpus is not None and options.fake_gpus is not None:
        raise UsageError("--gpus and --fake-gpus cannot be combined: devices are either real or fake")
    if options.shake is not None and (options.repeat is not None or options.until_failure):
        raise UsageError("--shake repeats tests by itself: leave out --repeat and --until-failure")
    if options.shake is not None:
        seed = random.randrange(2**31) if options.shake_seed is None else options.shake_seed
        options = dataclasses.replace(options, repeat=options.shake, shake_seed=seed)
    _check_cluster(options, sources)
    if options.cluster is not None and sources["jobs"] == DEFAULT:
        options = dataclasses.replace(options, jobs=ALL_CPUS)  # the cores of this machine say nothing about the nodes
    if options.drop_in:
        options = _dropped_in(options, sources, cwd)
    return dataclasses.replace(options, shuffle=options.shuffle or options.seed is not None)


def _check_cluster(options: Options, sources: Mapping[str, str]) -> None:
    """Raises UsageError for options that contradict --cluster, or need it."""
    if options.cluster is None:
        for field in OPTION_TABLE:
            if field.startswith("cluster_") and sources[field] == COMMAND_LINE:
                raise UsageError(f"{OPTION_TABLE[field].flags[0]} needs --cluster")
        return
    if options.ranks_per_gpu > 1:
        raise UsageError(
            "--cluster and --ranks-per-gpu cannot be combined: ranks share the devices of one machine only"
        )
    if options.fake_gpus is not None:
        raise UsageError("--cluster and --fake-gpus cannot be combined: the nodes have the accelerators")
    if options.gpus is not None:
        raise UsageError("--cluster and --gpus cannot be combined: use --cluster-gpus-per-node")


def _dropped_in(options: Options, sources: Mapping[str, str], cwd: Path) -> Options:
    """The options for the tests of checkouts, folders and files, which are not the project's own.

    Names select among these. They have a cache of their own, since the project may have tests with the same names.
    """
    places = _existing(options.drop_in)
    files = _further_files(places, options.names, cwd)
    places = (*places, *files)
    below = [_resolved(Options().tests, place) if is_checkout(place) else (place,) for place in places]
    given = sources["tests"] == COMMAND_LINE or sources["tests"].startswith(PREFIX)  # a file has the project's folders
    return dataclasses.replace(
        options,
        drop_in=places,
        names=() if files else options.names,
        tests=options.tests if given else tuple(test for tests in below for test in tests),
        cache=options.cache / "drop_in" if sources["cache"] == DEFAULT else options.cache,
    )


def _existing(places: Sequence[Path]) -> tuple[Path, ...]:
    """The places, without symbolic links. Raises UsageError for one that is missing or is named twice."""
    found: list[Path] = []
    for place in places:
        path = place.resolve()
        if not path.exists():
            raise UsageError(f"--drop-in {place}: there is no such file or folder")
        if path.is_file() and path.suffix != ".py":
            raise UsageError(f"--drop-in {place}: this file is not a Python file")
        if path in found:
            raise UsageError(f"--drop-in {place}: named twice")
        found.append(path)
    return tuple(found)


def _further_files(places: Sequence[Path], names: Sequence[str], cwd: Path) -> tuple[Path, ...]:
    """With `--drop-in FILE FILE ...`, the files after the first, which look like names. Raises UsageError."""
    paths = [(cwd / name).resolve() for name in names]
    all_files = all(path.is_file() and path.suffix == ".py" for path in (*places, *paths))
    if not all_files or set(paths) <= set(places):
        return ()
    return _existing((*places, *(cwd / name for name in names)))[len(places) :]


def show(configured: ConfiguredOptions) -> str:
    """The value and the source of every option, one per line."""
    lines = []
    for field in OPTION_TABLE:
        lines.append((f"{field} = {_shown(getattr(configured.options, field))}", configured.sources[field]))
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:{width}}  ({source})" for text, source in lines)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_shown(one) for one in value) or "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    return "(none)" if value is None else str(getattr(value, "value", value))


# -- layers


def _defaults(root: Path) -> Layer:
    options = Options()
    return {field: (_resolved(getattr(options, field), root), DEFAULT) for field in OPTION_TABLE}


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
        return {}
    toml = _toml_reader(file)
    try:
        section = toml.loads(text).get("tool", {}).get(SECTION, {})
    except toml.TOMLDecodeError as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    return _from_file({key: _as_text(value) for key, value in section.items()}, file, root)


def _toml_reader(file: Path) -> ModuleType:
    for name in ("tomllib", "tomli"):  # tomllib is in Python since 3.11; tomli is a package
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    version = ".".join(map(str, sys.version_info[:2]))
    raise UsageError(
        f"{file} configures {SECTION}, but Python {version} cannot read TOML. Install tomli, or move the settings "
        f"to the section [{SECTION}] of setup.cfg, which every Python can read."
    )


def _as_text(value: Any) -> str:
    """The value as an INI file would have it (a list becomes lines), so that both formats are read in the same way."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_file(section: Mapping[str, str], file: Path, root: Path) -> Layer:
    known = {field.replace("_", "-"): field for field, spec in OPTION_TABLE.items() if spec.configurable}
    layer = {}
    for key, text in section.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"{file}: {key} is not an option of [{SECTION}].{nearest(name, known)}")
        layer[known[name]] = _read(known[name], text, f"{file}: {key}", root), file.name
    return layer


def _environment(environ: Mapping[str, str], cwd: Path) -> Layer:
    known = {PREFIX + field.upper(): field for field, spec in OPTION_TABLE.items() if spec.configurable}
    layer = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or not text:
            continue
        if name not in known:
            raise UsageError(f"{name} is not an environment variable of run_test.py.{nearest(name, known)}")
        layer[known[name]] = _read(known[name], text, name, cwd), name
    return layer


def _shared_with_python(environ: Mapping[str, str]) -> Layer:
    """The variable that lets ranks share devices also without run_test.py."""
    if not environ.get(RANKS_PER_GPU):
        return {}
    try:
        return {"ranks_per_gpu": (ranks_per_device(environ), RANKS_PER_GPU)}
    except ValueError as error:
        raise UsageError(str(error)) from None


def _read(field: str, text: str, source: str, base: Path) -> Any:
    spec = OPTION_TABLE[field]
    texts = [line.strip() for line in text.splitlines() if line.strip()] if spec.many else [text.strip()]
    try:
        values = tuple(spec.read(one) for one in texts)
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    return _resolved(values if spec.many else values[0], base)


def _resolved(value: Any, base: Path) -> Any:
    """A path is relative to the place where it is written: a file's folder, or the working directory."""
    if isinstance(value, tuple) and value and isinstance(value[0], Path):
        return tuple(base / one for one in value)
    return base / value if isinstance(value, Path) else value


# -- the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists all options)")


def _command_line(argv: Sequence[str], cwd: Path) -> Layer:
    given, unknown = _parser().parse_known_intermixed_args(_with_values(argv))
    if unknown:
        raise UsageError(f"{unknown[0]} is not an option.{nearest(unknown[0], _flags())} (--help lists all options)")
    return {field: (_resolved(_frozen(value), cwd), COMMAND_LINE) for field, value in vars(given).items()}


def _with_values(argv: Sequence[str]) -> list[str]:
    """The words, where flags that may be alone have their values: argparse would take the next word for that."""
    alone = {flag: f"{flag}={spec.alone}" for spec in OPTION_TABLE.values() if spec.alone for flag in spec.flags}
    return [alone.get(word, word) for word in argv]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _flags() -> list[str]:
    return [name for field, spec in OPTION_TABLE.items() for names, _ in _arguments(field, spec) for name in names]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program(),
        description="Run distributed tests in parallel on the available devices and cores.",
        usage="%(prog)s [options] [NAME ...]",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    for title, specs in OPTION_GROUPS.items():
        group = parser.add_argument_group(title)
        for field, spec in specs.items():
            for names, more in _arguments(field, spec):
                group.add_argument(*names, **more)
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser


def _arguments(field: str, spec: OptionSpec) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The arguments of argparse's add_argument for an option: for each of its flags, or for the option itself."""
    for flag in spec.values:
        yield flag.names, {"dest": field, "action": "store_const", "const": flag.value, "help": flag.help}
    if spec.read is boolean:
        yield spec.flags, {"dest": field, "action": argparse.BooleanOptionalAction, "help": spec.help}
    elif not spec.values:
        help_text = spec.help + _default_text(field, spec)
        yield (spec.flags or (field,)), {**_valued(field, spec), "metavar": spec.metavar, "help": help_text}


def _default_text(field: str, spec: OptionSpec) -> str:
    """` (default: 300)`, unless there is no default or the help already says it."""
    value = getattr(Options(), field)
    if value is None or value == () or "(default: " in spec.help:
        return ""
    return f" (default: {f'{value:g}' if isinstance(value, float) else _shown(value)})"


def _valued(field: str, spec: OptionSpec) -> dict[str, Any]:
    valued: dict[str, Any] = {"type": _type_of(spec)}
    if not spec.flags:
        return {**valued, "nargs": "*"}
    if spec.many:
        valued.update({"action": "extend", "nargs": "+"} if spec.several else {"action": "append"})
    return {**valued, "dest": field}


def _type_of(spec: OptionSpec) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return spec.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
