"""Options from all sources, and the folders of a project's tests."""

import argparse
import configparser
import dataclasses
import glob
import importlib
import random
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch_testing_ext._machine.device_rules import RANKS_PER_GPU
from torch_testing_ext._process import user_shell
from torch_testing_ext._process.logs import text_of

from .options import (
    ALL_CPUS,
    OPTION_GROUPS,
    OPTION_TABLE,
    Options,
    OptionSpec,
    UsageError,
    is_checkout,
    nearest,
    read_boolean,
    tests_of_checkout,
)

# --------------------------------------------------------------------------------------------------------------------
# The root of a project and the folders of its tests, where its settings name none.

# Files with settings of ours or of pytest, and how such a section begins. As in pytest, the first with some counts.
_SECTIONS = {
    "pytest.toml": ("",),
    "pytest.ini": ("",),
    ".pytest.ini": ("",),
    "pyproject.toml": ("[tool.torch_testing_ext", "[tool.pytest"),
    "tox.ini": ("[pytest]",),
    "setup.cfg": ("[torch_testing_ext]", "[tool:pytest]"),
}
SETTINGS_FILES = tuple(_SECTIONS)
_TABLES = (("tool", "pytest", "ini_options"), ("tool", "pytest"), ("pytest",))


def project_root(cwd: Path) -> Path:
    """The nearest folder from here upwards that has settings of ours or of pytest; without any, this one."""
    for folder in (cwd, *cwd.parents):
        for file in _files(folder):
            if file.is_file() and _has_settings(file):
                return folder
    return cwd


def _has_settings(file: Path) -> bool:
    text = text_of(file)
    return any(section in text for section in _SECTIONS[file.name])


def default_folders(root: Path) -> tuple[Path, ...]:
    """pytest's testpaths, if there are any; else `test` and `tests`; else the test files of the root itself."""
    folders = []
    for pattern in _first_testpaths(root):
        for path in sorted(glob.glob(pattern, root_dir=root, recursive=True)):
            folders.append(root / path)
    if not folders:
        folders = [root / name for name in ("test", "tests") if (root / name).is_dir()]
    return tuple(folders or sorted(root.glob("test_*.py")))


def _first_testpaths(root: Path) -> Sequence[str]:
    for file in _files(root):
        patterns = _testpaths(file)
        if patterns:
            return patterns
    return ()


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _SECTIONS]


def _testpaths(file: Path) -> Sequence[str]:
    """None if the file cannot be read: pytest will say so, or nobody needs it."""
    text = text_of(file)
    if "testpaths" not in text:
        return ()
    # TOMLDecodeError is a ValueError.
    with suppress(ValueError, configparser.Error):
        value = _of_toml(text) if file.suffix == ".toml" else _of_ini(text, file.name)
        if isinstance(value, str):
            return shlex.split(value)
        return [str(path) for path in value]
    return ()


def _of_toml(text: str) -> Any:
    toml = toml_module()
    if toml is None:
        return ()
    content = toml.loads(text)
    for path in _TABLES:
        table = _table(content, path)
        if "testpaths" in table:
            return table["testpaths"]
    return ()


def _table(content: Any, path: Sequence[str]) -> Any:
    """The table of this name; empty if there is none."""
    for name in path:
        if not isinstance(content, dict):
            return {}
        content = content.get(name)
    return content if isinstance(content, dict) else {}


def toml_module() -> ModuleType | None:
    """The module that reads TOML: tomllib is in Python since 3.11; tomli is a package."""
    for name in ("tomllib", "tomli"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


def _of_ini(text: str, name: str) -> str:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(text)
    section = "tool:pytest" if name == "setup.cfg" else "pytest"
    return parser.get(section, "testpaths", fallback="")


# --------------------------------------------------------------------------------------------------------------------
# Reads Options from all sources: default < setup.cfg < pyproject.toml < environment < command line.
#
# A misspelt name is an error, in every source; the message names the source and the nearest known names.

SECTION = "torch_testing_ext"
# The same as launch/environment.py's RUNNER_PREFIX, which is not imported here: --help would import all of launch/.
PREFIX = "TORCH_TESTING_EXT_RUN_"
DEFAULT = "default"
COMMAND_LINE = "command line"
# The options that one source sets: by field, the value and its exact source.
Layer = dict[str, tuple[Any, str]]
EXIT_CODES = """\
set a project up, and run its first test:
  %(prog)s init

convert the tests of another project (see docs/moving):
  %(prog)s moving [--diff] PROJECT PATH ...

reports of an earlier run, also of one that was killed:
  %(prog)s report [JOURNAL] [--junit FILE] [--html FILE] [--trace FILE] [--results FILE]

%(prog)s cluster clean [--cluster ADDRESS] removes what the nodes of a Ray cluster have kept

exit codes:
  0  no test failed
  1  at least one test failed
  2  the run was interrupted
  3  internal error of this program
  4  usage error: nothing was run
  5  nothing was selected
  6  everything selected was skipped: not enough devices"""


@dataclass(frozen=True)
class ConfiguredOptions:
    """The options in force, and the source of each."""

    options: Options
    # By field.
    sources: Mapping[str, str]


def read_options(
    argv: Sequence[str],
    environ: Mapping[str, str],
    root: Path,
    cwd: Path,
    of_report: Collection[str] = (),
) -> ConfiguredOptions:
    """Reads all sources. `root` is the project's folder, which has its configuration files.

    `of_report`: the options that the command `report` has, for its --help. Raises UsageError; raises SystemExit only
    for --help.
    """
    if of_report and not {"-h", "--help"}.isdisjoint(argv):
        _parser(of_report).parse_args(["--help"])
    layers = (
        _defaults(root),
        _setup_cfg(root),
        _pyproject(root),
        _shared_with_python(environ, cwd),
        _environment(environ, cwd),
        _command_line(argv, cwd),
    )
    values = {}
    sources = {}
    for layer in layers:
        for field, (value, source) in layer.items():
            values[field] = value
            sources[field] = source
    return ConfiguredOptions(_complete(Options(**values), sources, cwd), sources)


def _complete(options: Options, sources: Mapping[str, str], cwd: Path) -> Options:
    """The options with what follows from them. Raises UsageError if some contradict each other."""
    if options.gpus is not None and options.fake_gpus is not None:
        raise UsageError("--gpus and --fake-gpus cannot be combined: devices are either real or fake")
    if options.shake is not None and (options.repeat is not None or options.until_failure):
        raise UsageError("--shake repeats tests by itself: leave out --repeat and --until-failure")
    if options.shake is not None:
        seed = random.randrange(2**31) if options.shake_seed is None else options.shake_seed
        options = dataclasses.replace(options, repeat=options.shake, shake_seed=seed)
    options = _debugged(options, sources)
    if options.since is not None and not (options.affected or options.why):
        raise UsageError("--since needs --affected or --why")
    _check_cluster(options, sources)
    if options.cluster is not None and sources["jobs"] == DEFAULT:
        # The cores of this machine say nothing about the nodes.
        options = dataclasses.replace(options, jobs=ALL_CPUS)
    if options.drop_in:
        options = _dropped_in(options, sources, cwd)
    return dataclasses.replace(options, shuffle=options.shuffle or options.seed is not None)


def _debugged(options: Options, sources: Mapping[str, str]) -> Options:
    """The options of a run with a debugger: one test at a time."""
    if sources["rank"] == COMMAND_LINE and not options.debug:
        raise UsageError("--rank needs --debug")
    if not (options.pdb or options.debug):
        return options
    if options.cluster is not None:
        raise UsageError("--cluster and --pdb cannot be combined: the tests run where no terminal is")
    return dataclasses.replace(options, pdb=True, jobs=1)


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
    if options.fake_accelerators is not None:
        raise UsageError("--cluster and --fake-accelerators cannot be combined: the nodes have the accelerators")
    if options.fake_gpus is not None:
        raise UsageError("--cluster and --fake-gpus cannot be combined: the nodes have the accelerators")
    if options.cluster == "slurm" and options.cluster_fake_gpus:
        raise UsageError("--cluster slurm and --cluster-fake-gpus cannot be combined: Slurm names no accelerators")
    if options.cluster_fetch and (options.cluster == "slurm" or options.cluster_root is not None):
        raise UsageError("--cluster-fetch is for a project that is sent to the nodes: these share its folder")
    if options.gpus is not None:
        raise UsageError("--cluster and --gpus cannot be combined: use --cluster-gpus-per-node")


def _dropped_in(options: Options, sources: Mapping[str, str], cwd: Path) -> Options:
    """The options for the tests of checkouts, folders and files, which are not the project's own.

    Names select among these. They have a cache of their own, since the project may have tests with the same names.
    """
    places = _existing(options.drop_in)
    files = _further_files(places, options.names, cwd)
    places = (*places, *files)
    tests = options.tests
    # A configuration file has the project's folders.
    are_for_this_run = sources["tests"] == COMMAND_LINE or sources["tests"].startswith(PREFIX)
    if not are_for_this_run:
        tests = tuple(tests_of_checkout(place) if is_checkout(place) else place for place in places)
    cache = options.cache
    if sources["cache"] == DEFAULT:
        cache = cache / "drop_in"
    names = () if files else options.names
    return dataclasses.replace(options, drop_in=places, names=names, tests=tests, cache=cache)


def _existing(places: Sequence[Path]) -> tuple[Path, ...]:
    """The places, without symbolic links. Raises UsageError for one that is missing or is named twice."""
    paths: list[Path] = []
    for place in places:
        path = place.resolve()
        if not path.exists():
            raise UsageError(f"--drop-in {place}: there is no such file or folder")
        if path.is_file() and path.suffix != ".py":
            raise UsageError(f"--drop-in {place}: this file is not a Python file")
        if path in paths:
            raise UsageError(f"--drop-in {place}: named twice")
        paths.append(path)
    return tuple(paths)


def _further_files(places: Sequence[Path], names: Sequence[str], cwd: Path) -> tuple[Path, ...]:
    """With `--drop-in FILE FILE ...`, the files after the first, which look like names. Raises UsageError."""
    named = [cwd / name for name in names]
    paths = [path.resolve() for path in named]
    for path in (*places, *paths):
        if not path.is_file() or path.suffix != ".py":
            return ()
    if set(paths) <= set(places):
        return ()
    all_files = _existing((*places, *named))
    return all_files[len(places) :]


def show_options(configured: ConfiguredOptions) -> str:
    """The value and the source of every option, one per line."""
    settings = {}
    for field in OPTION_TABLE:
        value = _shown(getattr(configured.options, field))
        settings[field] = f"{field} = {value}"
    width = max(len(setting) for setting in settings.values())
    lines = [f"{setting:{width}}  ({configured.sources[field]})" for field, setting in settings.items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_shown(item) for item in value) or "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "(none)"
    # That of a member of an enumeration.
    return str(getattr(value, "value", value))


# -- layers


def _defaults(root: Path) -> Layer:
    options = Options(tests=default_folders(root))
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
    # As an INI file would have them (a list is lines), so that both formats are read in the same way.
    texts = {}
    for key, value in (pyproject_section(root) or {}).items():
        lines = value if isinstance(value, list) else [value]
        texts[key] = "\n".join(map(str, lines))
    return _from_file(texts, root / "pyproject.toml", root)


def pyproject_section(root: Path) -> dict[str, Any] | None:
    """The settings in the file, if it has any. Raises UsageError."""
    file = root / "pyproject.toml"
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if f"tool.{SECTION}" not in text.replace(" ", ""):
        return None
    toml = _toml_reader(file)
    try:
        section = toml.loads(text).get("tool", {}).get(SECTION)
    except toml.TOMLDecodeError as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if not isinstance(section, dict | None):
        raise UsageError(f"{file}: [tool.{SECTION}] is no table")
    return section


def _toml_reader(file: Path) -> ModuleType:
    toml = toml_module()
    if toml is not None:
        return toml
    version = ".".join(map(str, sys.version_info[:2]))
    raise UsageError(
        f"{file} configures {SECTION}, but Python {version} cannot read TOML. Install tomli, or move the settings "
        f"to the section [{SECTION}] of setup.cfg, which every Python can read."
    )


def _from_file(section: Mapping[str, str], file: Path, root: Path) -> Layer:
    known = {field.replace("_", "-"): field for field, spec in OPTION_TABLE.items() if spec.configurable}
    layer = {}
    for key, text in section.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"{file}: {key} is not an option of [{SECTION}].{nearest(name, known)}")
        field = known[name]
        layer[field] = _read(field, text, f"{file}: {key}", root), file.name
    return layer


def _environment(environ: Mapping[str, str], cwd: Path) -> Layer:
    known = {PREFIX + field.upper(): field for field, spec in OPTION_TABLE.items() if spec.configurable}
    layer = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or not text:
            continue
        if name not in known:
            raise UsageError(f"{name} is not an environment variable of the runner.{nearest(name, known)}")
        field = known[name]
        layer[field] = _read(field, text, name, cwd), name
    return layer


# Variables that have the same effect with the runner and without, by the field of Options.
_SHARED = {
    "ranks_per_gpu": RANKS_PER_GPU,
    "timeout": "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT",
    "stream": "TORCH_TESTING_EXT_STREAM",
}
# With --pdb, any rank can have the terminal.
_DEBUG_RANK = "TORCH_TESTING_EXT_DEBUG_RANK"


def _shared_with_python(environ: Mapping[str, str], cwd: Path) -> Layer:
    layer: Layer = {}
    for field, name in _SHARED.items():
        if environ.get(name):
            layer[field] = _read(field, environ[name], name, cwd), name
    if environ.get(_DEBUG_RANK):
        layer["pdb"] = True, _DEBUG_RANK
    return layer


def _read(field: str, text: str, source: str, base: Path) -> Any:
    spec = OPTION_TABLE[field]
    texts = [text.strip()]
    if spec.many:
        lines = [line.strip() for line in text.splitlines()]
        texts = [line for line in lines if line]
    try:
        values = tuple(spec.read(item) for item in texts)
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


# -- the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists all options)")


def _command_line(argv: Sequence[str], cwd: Path) -> Layer:
    given, unknown = _parser().parse_known_intermixed_args(_with_values(argv))
    if unknown:
        flags: list[str] = []
        for field, spec in OPTION_TABLE.items():
            for names, _ in _arguments(field, spec):
                flags += names
        raise UsageError(f"{unknown[0]} is not an option.{nearest(unknown[0], flags)} (--help lists all options)")
    layer = {}
    for field, value in vars(given).items():
        if isinstance(value, list):
            value = tuple(value)
        layer[field] = _resolved(value, cwd), COMMAND_LINE
    return layer


def _with_values(argv: Sequence[str]) -> list[str]:
    """The words, where argparse would not see whether the next one is the value of a flag.

    A flag that may be alone gets its value, and so does one whose value may begin with a dash.
    """
    alone: dict[str, str] = {}
    dashed: set[str] = set()
    for spec in OPTION_TABLE.values():
        if spec.alone:
            alone.update((flag, f"{flag}={spec.alone}") for flag in spec.flags)
        if spec.dashed:
            dashed.update(spec.flags)
    words: list[str] = []
    for word in reversed(argv):
        word = alone.get(word, word)
        if word in dashed and words:
            # The word after it is its value.
            words[-1] = f"{word}={words[-1]}"
        else:
            words.append(word)
    words.reverse()
    return words


def _parser(of_report: Collection[str] = ()) -> argparse.ArgumentParser:
    """The parser of the command line of a run, or of the command `report`."""
    report = "Make reports of an earlier run, also of one that was killed: of the newest, or of that of a journal."
    parser = _Parser(
        prog=user_shell.runner(),
        description=report if of_report else "Run distributed tests in parallel on the available devices and cores.",
        usage="%(prog)s report [options] [JOURNAL]" if of_report else "%(prog)s [options] [NAME ...]",
        epilog=None if of_report else EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    for title, specs in OPTION_GROUPS.items():
        group = parser.add_argument_group(title)
        for field, spec in specs.items():
            if of_report and (field not in of_report or field == "names"):
                continue
            for names, more in _arguments(field, spec):
                group.add_argument(*names, **more)
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser


def _arguments(field: str, spec: OptionSpec) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The arguments of argparse's add_argument for an option: for each of its flags, or for the option itself."""
    for flag in spec.values:
        yield flag.names, {"dest": field, "action": "store_const", "const": flag.value, "help": flag.help}
    if spec.read is read_boolean:
        yield spec.flags, {"dest": field, "action": argparse.BooleanOptionalAction, "help": spec.help}
    elif not spec.values:
        valued = _valued(field, spec)
        valued["metavar"] = spec.metavar
        valued["help"] = spec.help + _default_text(field, spec)
        yield (spec.flags or (field,)), valued


def _default_text(field: str, spec: OptionSpec) -> str:
    """` (default: 300)`, unless there is no default or the help already says it."""
    value = getattr(Options(), field)
    if value is None or value == () or "(default: " in spec.help:
        return ""
    shown = f"{value:g}" if isinstance(value, float) else _shown(value)
    return f" (default: {shown})"


def _valued(field: str, spec: OptionSpec) -> dict[str, Any]:
    valued: dict[str, Any] = {"type": _type_of(spec)}
    if not spec.flags:
        valued["nargs"] = "*"
        return valued
    valued["dest"] = field
    if spec.several:
        valued["nargs"] = "+"
    if spec.many:
        valued["action"] = "extend" if spec.several else "append"
    return valued


def _type_of(spec: OptionSpec) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return spec.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
