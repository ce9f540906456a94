"""Options from all sources, and the folders of a project's tests."""

import configparser
import dataclasses
import glob
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._machine.device_rules import RANKS_PER_GPU
from torch_testing_ext._process import project_settings
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.project_settings import (
    RUNNER_PREFIX,
    SECTION,
    files_in,
    is_checkout,
    read_toml,
    tests_of_checkout,
)
from torch_testing_ext._process.words import nearest
from torch_testing_ext.faults import KnownHang, fault_of_text

from .command_line import ParsedWords, parse_words, setting_name, shown_value, written_name
from .model import KnownFile
from .options import ALL_CPUS, OPTION_TABLE, Options, UsageError

# --------------------------------------------------------------------------------------------------------------------
# The folders of a project's tests, where its settings name none.

_TABLES = (("tool", "pytest", "ini_options"), ("tool", "pytest"), ("pytest",))


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
    for file in files_in(root):
        patterns = _testpaths(file)
        if patterns:
            return patterns
    return ()


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
    content = read_toml(text)
    for path in _TABLES:
        found = table(content, path)
        if "testpaths" in found:
            return found["testpaths"]
    return ()


def toml_content(file: Path) -> Any:
    """The content of a TOML file; empty if it cannot be read."""
    # TOMLDecodeError is a ValueError.
    with suppress(ValueError):
        return read_toml(text_of(file))
    return {}


def table(content: Any, path: Sequence[str]) -> Any:
    """The table of this name; empty if there is none."""
    for name in path:
        if not isinstance(content, dict):
            return {}
        content = content.get(name)
    return content if isinstance(content, dict) else {}


def _of_ini(text: str, name: str) -> str:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(text)
    section = "tool:pytest" if name == "setup.cfg" else "pytest"
    return parser.get(section, "testpaths", fallback="")


# --------------------------------------------------------------------------------------------------------------------
# Reads Options from all sources: default < pyproject.toml < environment < command line.
#
# A misspelt name is an error, in every source; the message names the source and the nearest known names.

PREFIX = RUNNER_PREFIX
DEFAULT = "default"
COMMAND_LINE = "command line"
# The options that one source sets: by field, the value and its exact source.
Layer = dict[str, tuple[Any, str]]


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
    command: str = "",
    *,
    as_pytorch: bool = False,
) -> ConfiguredOptions:
    """Reads all sources. `root` is the project's folder, which has its configuration files.

    `command`: `show` or the like. `as_pytorch`: -i and -x are those of PyTorch's run_test.py. Raises UsageError; raises
    SystemExit only for --help and --help-all.
    """
    words = parse_words(argv, command, as_pytorch)
    layers = (
        _defaults(root),
        _pyproject(root),
        _shared_with_python(environ, cwd),
        _environment(environ, cwd),
        _command_line(words, cwd),
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
    if options.shake is not None and options.repeat is not None:
        raise UsageError("--shake repeats tests by itself: leave out --repeat")
    if options.shake is not None and options.shake.seed is None:
        shake = dataclasses.replace(options.shake, seed=random.randrange(2**31))
        options = dataclasses.replace(options, shake=shake)
    _check_world(options)
    options = _drilled(options, sources)
    options = _debugged(options, sources)
    _check_cluster(options, sources)
    if options.cluster is not None and sources["jobs"] == DEFAULT:
        # The cores of this machine say nothing about the nodes.
        options = dataclasses.replace(options, jobs=ALL_CPUS)
    if options.drop_in:
        options = _dropped_in(options, sources, cwd)
    return options


def _check_world(options: Options) -> None:
    """Raises UsageError for options that need ranks which communicate, or devices."""
    if options.world is None:
        return
    for field in _WHY_ALONE:
        default = Options.__dataclass_fields__[field].default
        if getattr(options, field) != default:
            flag = written_name(field)
            raise UsageError(f"--world and {flag} cannot be combined: ranks of a whole world {_WHY_ALONE[field]}")


# Why a whole world leaves no room for another option; and what to do.
_WHY_ALONE = {
    "pdb": "have no terminal. Leave out one of them",
    "trace": "have no terminal. Leave out one of them",
    "shake": "wait for nobody, so delays change nothing. Leave out one of them",
    "cluster": "run on this machine. Leave out one of them",
    "fake_accelerators": "use the CPU. Leave out one of them",
    "ranks_per_gpu": "use the CPU. Leave out one of them",
    "sanitize": "are compared anyway. Leave out --sanitize",
    "drill": "wait for nobody, so a fault hangs none of them. Leave out one of them",
}


def _drilled(options: Options, sources: Mapping[str, str]) -> Options:
    """The options of a drill, with what its file of known hangs says. Raises UsageError."""
    if options.drill is None:
        for field in OPTION_TABLE:
            if field.startswith("drill_") and sources[field] == COMMAND_LINE:
                raise UsageError(f"{written_name(field)} needs --drill")
        return options
    for field in ("pdb", "trace"):
        if getattr(options, field):
            flag = written_name(field)
            raise UsageError(f"--drill and {flag} cannot be combined: a test that stops has no time limit")
    if not isinstance(options.drill_known, Path):
        return options
    known = KnownFile(options.drill_known, read_known_hangs(options.drill_known))
    return dataclasses.replace(options, drill_known=known)


_OF_KNOWN = ("test", "fault", "reason")
_TABLE = re.compile(r"\s*\[\[\s*known\s*\]\]")


def read_known_hangs(file: Path) -> tuple[KnownHang, ...]:
    """The tables [[known]] of a file. Raises UsageError."""
    try:
        written = file.read_text(encoding="utf-8")
        content = read_toml(written)
    except (OSError, ValueError) as error:
        raise UsageError(f"--drill-known {file}: {error}") from None
    for name in content.keys() - {"known"}:
        raise UsageError(f"--drill-known {file}: {name} is not a table of this file. Write [[known]]")
    tables = content.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise UsageError(f"--drill-known {file}: write [[known]], in double brackets, before each known hang")
    places = [f"line {n}" for n, line in enumerate(written.splitlines(), 1) if _TABLE.match(line)]
    if len(places) != len(tables):
        # They need not have lines of their own.
        places = [f"number {n}" for n in range(1, len(tables) + 1)]
    wheres = [f"--drill-known {file}, [[known]] {place}" for place in places]
    return tuple(_known_hang(where, table) for where, table in zip(wheres, tables, strict=True))


def _known_hang(where: str, given: Mapping[str, Any]) -> KnownHang:
    for name in given.keys() - set(_OF_KNOWN):
        raise UsageError(f"{where}: {name} is not one of {', '.join(_OF_KNOWN)}.{nearest(name, _OF_KNOWN)}")
    for name in _OF_KNOWN:
        if not isinstance(given.get(name), str) or not given[name].strip():
            raise UsageError(f"{where}: {name} is missing")
    try:
        return KnownHang(given["test"].strip(), fault_of_text(given["fault"]), given["reason"].strip())
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _debugged(options: Options, sources: Mapping[str, str]) -> Options:
    """The options of a run with a debugger: one test at a time."""
    if sources["debug_rank"] == COMMAND_LINE and not options.trace:
        raise UsageError("--debug-rank needs --trace")
    if not (options.pdb or options.trace):
        return options
    if options.cluster is not None:
        raise UsageError("--cluster and --pdb cannot be combined: tests on a cluster have no terminal")
    return dataclasses.replace(options, pdb=True, jobs=1)


def _check_cluster(options: Options, sources: Mapping[str, str]) -> None:
    """Raises UsageError for options that contradict --cluster, or need it."""
    if options.cluster is None:
        for field in OPTION_TABLE:
            if field.startswith("cluster_") and sources[field] == COMMAND_LINE:
                raise UsageError(f"{written_name(field)} needs --cluster")
        return
    if options.ranks_per_gpu > 1:
        raise UsageError(
            "--cluster and --ranks-per-gpu cannot be combined: ranks share the devices of one machine only"
        )
    if options.fake_accelerators is not None:
        raise UsageError("--cluster and --fake-accelerators cannot be combined: the nodes have the accelerators")
    if options.cluster == "slurm" and options.cluster_fake_gpus:
        raise UsageError("--cluster slurm and cluster.fake-gpus cannot be combined: Slurm names no accelerators")
    if options.cluster_fetch and (options.cluster == "slurm" or options.cluster_root is not None):
        raise UsageError("cluster.fetch is for a project that is sent to the nodes: these share its folder")
    if options.gpus is not None:
        raise UsageError("--cluster and --gpus cannot be combined: use -o cluster.gpus-per-node=N")


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
        value = shown_value(getattr(configured.options, field))
        settings[field] = f"{setting_name(field)} = {value}"
    width = max(len(setting) for setting in settings.values())
    lines = [f"{setting:{width}}  ({configured.sources[field]})" for field, setting in settings.items()]
    return "\n".join(lines)


# -- layers


def _defaults(root: Path) -> Layer:
    options = Options(tests=default_folders(root))
    return {field: (_resolved(getattr(options, field), root), DEFAULT) for field in OPTION_TABLE}


def _pyproject(root: Path) -> Layer:
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
    """The settings of [tool.torch_testing_ext], and with their prefix those of [tool.torch_testing_ext.cluster]."""
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
    raise UsageError(f"{source} {key} is not a setting of [tool.{SECTION}].{nearest(name, known)}")


def _environment(environ: Mapping[str, str], cwd: Path) -> Layer:
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


def _command_line(words: ParsedWords, cwd: Path) -> Layer:
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
