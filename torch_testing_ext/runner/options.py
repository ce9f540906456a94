"""The options of a run, and the table that the command line and its help follow from."""

from __future__ import annotations

import difflib
import enum
import math
import os
from collections.abc import Callable, Iterable
from configparser import ConfigParser
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.sanitizer_kinds import KNOWN, read_kinds
from torch_testing_ext._process import system, user_shell
from torch_testing_ext._process.files import CACHE
from torch_testing_ext._process.user_shell import UserTerminal

from .model import Policy

# --------------------------------------------------------------------------------------------------------------------
# The options of a run, as the rest of the runner reads them.

# Similarity as difflib measures it; 1 means equal.
NEAR = 0.5


class UsageError(ValueError):
    """A mistake in the command line or the configuration; nothing runs."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean: a, b?`; the nearest known names if none is similar."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, cutoff=NEAR)
    if near:
        return f" Did you mean: {', '.join(near)}?"
    nearest_names = difflib.get_close_matches(name, names, cutoff=0.0)
    return f" Nearest known: {', '.join(nearest_names)}." if nearest_names else ""


class CannotRun(RuntimeError):
    """No test can run; the message says why."""


class Warm(enum.Enum):
    """Whether a warm server forks the preloaded server."""

    AUTO = "if one runs"
    START = "always"
    NEVER = "never"


class Rerun(enum.Enum):
    """The use of the failures of earlier runs."""

    NOTHING = "nothing"
    # Run only these tests.
    LAST_FAILED = "last-failed"
    # Run these tests first.
    FAILED_FIRST = "failed-first"


class Action(enum.Enum):
    """The work of run_test.py on the selected tests."""

    RUN = "run"
    LIST = "list"
    DRY_RUN = "dry-run"
    SHOW_CONFIG = "show-config"
    CLUSTER_DRY_RUN = "cluster-dry-run"


class Verbosity(enum.Enum):
    """The detail of the console report."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


class StatusLevel(enum.Enum):
    """The tests that get a line when they end: each level has those before it, too."""

    NONE = "none"
    FAIL = "fail"
    RETRY = "retry"
    SLOW = "slow"
    LEAK = "leak"
    PASS = "pass"
    SKIP = "skip"
    ALL = "all"

    def shows(self, level: StatusLevel) -> bool:
        levels = list(StatusLevel)
        return levels.index(self) >= levels.index(level)


class CountAs(enum.Enum):
    """Whether a flaky or leaking test counts as passed or failed."""

    PASS = "pass"
    FAIL = "fail"


class OrderHazard(enum.Enum):
    """The outcome of a test whose ranks issued collectives in opposite orders, and passed."""

    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class ShardSpec:
    """One of `count` parts of the tests."""

    # Starts at 1.
    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


# The number of jobs on a node of a cluster, unless --jobs limits it.
ALL_CPUS = 1 << 16
# A number of devices, their names, or None for all.
Gpus = int | tuple[str, ...] | None


@dataclass(frozen=True)
class Options:
    """All options of a run. option_sources.py makes the paths absolute; the table has flags and help texts."""

    names: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    # option_sources.py finds the project's.
    tests: tuple[Path, ...] = ()
    shard: ShardSpec | None = None
    rerun: Rerun = Rerun.NOTHING
    affected: bool = False
    since: str | None = None
    why: tuple[str, ...] = ()
    watch: bool = False

    jobs: int = field(default_factory=system.cores)
    gpus: Gpus = None
    fake_gpus: int | None = None
    ranks_per_gpu: int = 1
    shared_leases: bool = True
    memory_check: bool = True
    lease_folder: Path | None = None
    warm: Warm = Warm.AUTO

    cluster: str | None = None
    cluster_nodes: int | None = None
    cluster_gpus_per_node: int | None = None
    cluster_fake_gpus: bool = False
    cluster_timeout: float = 300.0
    cluster_root: Path | None = None
    cluster_setup: str | None = None
    cluster_fetch: tuple[str, ...] = ()
    cluster_env: str = ""
    cluster_only: tuple[str, ...] = ()
    cluster_not: tuple[str, ...] = ()

    timeout: float = 300.0
    slow: float = 30.0
    retries: int = 0
    flaky: CountAs = CountAs.PASS
    leaked: CountAs = CountAs.PASS
    max_fail: int | None = None
    repeat: int | None = None
    until_failure: bool = False
    shuffle: bool = False
    seed: int | None = None

    sanitize: str | None = None
    sanitize_order: OrderHazard = OrderHazard.WARN
    shake: int | None = None
    shake_seed: int | None = None

    pdb: bool = False
    debug: bool = False
    rank: int = 0

    verbosity: Verbosity = Verbosity.NORMAL
    status_level: StatusLevel = StatusLevel.ALL
    stream: bool = False
    durations: int = 5
    junit: Path | None = None
    report: Path | None = None
    trace: Path | None = None
    results: Path | None = None
    journal: Path | None = None
    allow_all_skipped: bool = False

    action: Action = Action.RUN
    json: bool = False
    cache: Path = Path(".torch_testing_ext")
    drop_in: tuple[Path, ...] = ()

    @property
    def drop_in_root(self) -> Path | None:
        """The folder to which the names of dropped-in tests are relative; None without any."""
        roots = {_root_of(path) for path in self.drop_in}
        return Path(os.path.commonpath(roots)) if roots else None

    @property
    def command(self) -> str:
        """The command that reruns a test whose name is appended to it."""
        words = [user_shell.runner()]
        if not self.drop_in:
            words += self._of_cache
        words += [f"-m {user_shell.quote(expression)}" for expression in self.marks]
        if self.cluster is not None:
            words.append(f"--cluster {user_shell.quote(self.cluster)}")
        if self.fake_gpus is not None:
            words.append(f"--fake-gpus {self.fake_gpus}")
        if self.ranks_per_gpu > 1:
            words.append(f"--ranks-per-gpu {self.ranks_per_gpu}")
        root = self.drop_in_root
        places = (root,) if root is not None and is_checkout(root) else self.drop_in
        words += [f"--drop-in {user_shell.quote(str(place))}" for place in places]
        if self.sanitize is not None:
            words.append(f"--sanitize={self.sanitize}")
        if self.sanitize_order is OrderHazard.FAIL:
            words.append("--sanitize-order=fail")
        return " ".join(words)

    @property
    def show_command(self) -> str:
        """The command that shows all about the failure of a test of this run, whose name is appended to it."""
        words = [user_shell.runner(), user_shell.SHOW]
        if self.journal is None:
            words += self._of_cache
        else:
            words.append(f"--journal {user_shell.quote(os.path.relpath(self.journal))}")
        return " ".join(words)

    @property
    def _of_cache(self) -> list[str]:
        cache = os.path.relpath(self.cache)
        if cache == CACHE:
            return []
        return [f"--cache {user_shell.quote(cache)}"]

    def command_of(self, repetition: int, command: str | None = None) -> str:
        """The command, or another one, for a test of this repetition: with the delays that it has had."""
        if command is None:
            command = self.command
        if self.shake_seed is None:
            return command
        return f"{command} --shake-seed {self.shake_seed + repetition}"

    def environment_of_sanitizer(self, repetition: int) -> dict[str, str]:
        """The settings of the ranks that follow from the options of the sanitizer."""
        environ = {}
        if self.sanitize is not None:
            environ["TORCH_TESTING_EXT_SANITIZE"] = self.sanitize
        if self.sanitize_order is OrderHazard.FAIL:
            environ["TORCH_TESTING_EXT_SANITIZE_ORDER"] = "fail"
        if self.shake_seed is not None:
            environ["TORCH_TESTING_EXT_SHAKE"] = str(self.shake_seed + repetition)
        if self.trace is not None:
            environ["TORCH_TESTING_EXT_LANES"] = "1"
        return environ

    def environment_of_debugger(self) -> dict[str, str]:
        """The settings by which processes of tests find the user's terminal, or know why they have none."""
        terminal = UserTerminal(why_not=f"run it with a debugger: {self.command} --pdb {user_shell.TEST}")
        if self.pdb:
            terminal = replace(UserTerminal.here(), stop_in=self.rank if self.debug else None)
        return {user_shell.SETTING: terminal.written(), "TORCH_TESTING_EXT_DEBUG_RANK": ""}

    def require_terminal(self) -> None:
        """Raises UsageError if a debugger is wanted and has no terminal."""
        if not self.pdb:
            return
        why_not = UserTerminal.here().why_not
        if why_not:
            flag = "--debug" if self.debug else "--pdb"
            raise UsageError(f"{flag} cannot stop: {why_not}")

    @property
    def endless(self) -> bool:
        """Whether the run repeats until a test fails, without a limit."""
        return self.until_failure and self.repeat is None

    @property
    def policy(self) -> Policy:
        return Policy(fail_flaky=self.flaky is CountAs.FAIL, fail_leaked=self.leaked is CountAs.FAIL)


def is_checkout(folder: Path) -> bool:
    """Is this a checkout of PyTorch, or a project that keeps its tests in the same folder?"""
    return (folder / "test").is_dir()


def tests_of_checkout(folder: Path) -> Path:
    """The tests of a checkout that are for us."""
    return next(path for path in (folder / "test" / "distributed", folder / "test") if path.is_dir())


def _root_of(path: Path) -> Path:
    """The checkout that contains a test file or folder; if there is none, the folder or that of the file."""
    if is_checkout(path):
        return path
    inside = next((folder.parent for folder in path.parents if folder.name == "test"), None)
    return inside or (path if path.is_dir() else path.parent)


# --------------------------------------------------------------------------------------------------------------------
# The option table: the command line, its help and the configuration files all follow from it.

# -- readers: convert the text of an option to its value; the message of a ValueError says what is valid


def whole_number(least: int) -> Callable[[str], int]:
    """A reader for whole numbers."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


count, count_or_zero = whole_number(1), whole_number(0)


def read_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a positive number of seconds")
    return value


def read_shard(text: str) -> ShardSpec:
    index, slash, total = text.partition("/")
    if not (slash and index.isdecimal() and total.isdecimal() and 1 <= int(index) <= int(total)):
        raise ValueError(f"{text!r} is not a shard: write I/N, such as 1/3 for the first of three")
    return ShardSpec(int(index), int(total))


def read_gpus(text: str) -> Gpus:
    """`auto`, a number of devices, or a comma-separated list of their names."""
    if text == "auto":
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if "," not in text and text.isdecimal():
        return int(text)
    if not names or len(set(names)) < len(names) or "-1" in names:
        raise ValueError(
            f"{text!r} is not auto, a number of devices, or a list of different devices such as 0,2 (a single one: 0,)"
        )
    return names


def read_cluster(text: str) -> str:
    """`auto`, `slurm`, or the address of a Ray cluster."""
    host, _, port = text.removeprefix("ray://").rpartition(":")
    if text in ("auto", "slurm") or (host and port.isdecimal() and int(port) < 1 << 16):
        return text
    raise ValueError(f"{text!r} is not auto, slurm, HOST:PORT or ray://HOST:PORT")


def read_environment(text: str) -> str:
    """Names of variables, or patterns, separated by commas: all with a dash before them, or none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len({name.startswith("-") for name in names}) > 1 or "-" in names:
        raise ValueError(f"{text!r} is no list of names such as A,B_* (only these) or -A,-B_* (all but these)")
    return ",".join(names)


def read_boolean(text: str) -> bool:
    known = ConfigParser.BOOLEAN_STATES
    if text.lower() not in known:
        raise ValueError(f"{text!r} is not true or false")
    return known[text.lower()]


def read_sanitizer_kinds(text: str) -> str:
    """Kinds of checks of the sanitizer, separated by commas."""
    read_kinds(text)
    return text


def read_path(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    # As a shell: `~name` stays if there is no such user.
    return Path(os.path.expanduser(text))


def one_of(kind: type[enum.Enum]) -> Callable[[str], Any]:
    """A reader for the values of an enum."""

    def read(text: str) -> Any:
        known = [member.value for member in kind]
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return kind(text)

    return read


# -- the table


@dataclass(frozen=True)
class ValueFlag:
    """A flag that sets an option to one member of an enum."""

    names: tuple[str, ...]
    value: enum.Enum
    help: str


@dataclass(frozen=True)
class OptionSpec:
    """One option, as it is written on the command line and in the configuration."""

    read: Callable[[str], Any]
    help: str = ""
    metavar: str = ""
    # The option may be given several times.
    many: bool = False
    # Each time with several values.
    several: bool = False
    values: tuple[ValueFlag, ...] = ()
    # Also in configuration files and the environment.
    configurable: bool = True
    # The value that the flag alone means.
    alone: str = ""
    # The value may begin with a dash.
    dashed: bool = False
    # Flags beside the one that is named after the field.
    also: tuple[str, ...] = ()
    # All of them, unless it is an argument without a flag or has flags for its values.
    flags: tuple[str, ...] = ()


# By the title of a group in --help, then by the field of Options.
OPTION_GROUPS = {
    "selection": {
        "names": OptionSpec(
            str,
            "file, directory, module, or a prefix of one; path::Class::test selects a single test (default: all tests)",
            "NAME",
            many=True,
            configurable=False,
        ),
        "include": OptionSpec(str, "same as NAME, as an option", "NAME", many=True, several=True, also=("-i",)),
        "exclude": OptionSpec(
            str, "do not run these; same syntax as NAME", "NAME", many=True, several=True, also=("-x",)
        ),
        "keyword": OptionSpec(
            str,
            "run only tests whose name contains a word or matches a pattern with *; combine words with and, or, not "
            "and parentheses; if given several times, one match is enough",
            "EXPRESSION",
            many=True,
            also=("-k",),
        ),
        "marks": OptionSpec(
            str,
            "run only tests whose marks of pytest match; combine names of marks with and, or, not and parentheses; if "
            "given several times, one match is enough",
            "EXPRESSION",
            many=True,
            also=("-m",),
        ),
        "tests": OptionSpec(
            read_path,
            "directory to search for tests; may be repeated (default: pytest's testpaths, else test and tests)",
            "DIR",
            many=True,
        ),
        "shard": OptionSpec(
            read_shard, "run part I of N, split by recorded durations, or by hash if there are none", "I/N"
        ),
        "rerun": OptionSpec(
            one_of(Rerun),
            values=(
                ValueFlag(("--last-failed", "--lf"), Rerun.LAST_FAILED, "run only tests that failed in their last run"),
                ValueFlag(
                    ("--failed-first", "--ff"), Rerun.FAILED_FIRST, "run tests that failed in their last run first"
                ),
            ),
        ),
        "affected": OptionSpec(
            read_boolean,
            "run only tests that have read a file that has changed since they ran, or since the last commit; also "
            "tests that failed in their last run, and tests without a record",
            configurable=False,
        ),
        "since": OptionSpec(str, "with --affected: or since the branch left REV", "REV", configurable=False),
        "why": OptionSpec(
            str, "say why --affected selects a test, or does not; run nothing", "TEST", many=True, configurable=False
        ),
        "watch": OptionSpec(
            read_boolean,
            "run affected tests after each save, on a page of the terminal; starts a warm server, unless --cold",
            configurable=False,
        ),
    },
    "resources": {
        "jobs": OptionSpec(
            count, "number of CPU slots; each rank takes one (default: one per usable core)", "N", also=("-j",)
        ),
        "gpus": OptionSpec(
            read_gpus,
            "number of accelerators to use, or a list of visible ones such as 0,2 (default: auto, all of them)",
            "N|LIST|auto",
        ),
        "fake_gpus": OptionSpec(count, "schedule tests on N accelerators that do not exist", "N"),
        "ranks_per_gpu": OptionSpec(
            count, "let up to N ranks share each GPU, for tests that need more of them than there are", "N"
        ),
        "shared_leases": OptionSpec(
            read_boolean, "use no accelerator that another run of this user on this machine uses"
        ),
        "memory_check": OptionSpec(
            read_boolean, "wait until a test's accelerators have their memory back, and use none again that have not"
        ),
        "lease_folder": OptionSpec(
            read_path,
            "directory of the files by which runs share accelerators (default: one per user, below /tmp)",
            "DIR",
        ),
        "warm": OptionSpec(
            one_of(Warm),
            values=(
                ValueFlag(("--warm",), Warm.START, "start a server that has imported torch, for this and later runs"),
                ValueFlag(("--cold",), Warm.NEVER, "do not use such a server, even if one runs"),
            ),
        ),
    },
    "cluster": {
        "cluster": OptionSpec(
            read_cluster,
            "run on the nodes of a Ray cluster: auto, HOST:PORT or ray://HOST:PORT; or of Slurm, in the allocation "
            "that is there or in one of its own: slurm",
            "ADDRESS",
        ),
        "cluster_nodes": OptionSpec(
            count,
            "number of nodes to use (default: all that are free; with Slurm, all of the allocation, or one of its own)",
            "N",
        ),
        "cluster_gpus_per_node": OptionSpec(
            count, "number of accelerators to use of each node (default: all that are free)", "N"
        ),
        "cluster_fake_gpus": OptionSpec(
            read_boolean, "take the accelerators that Ray names for fake ones, to try a cluster that has none"
        ),
        "cluster_timeout": OptionSpec(read_seconds, "how long to wait for nodes that are in use", "SECONDS"),
        "cluster_root": OptionSpec(
            read_path,
            "the project's path on every node, on a shared file system (default: the project is sent to the nodes)",
            "PATH",
        ),
        "cluster_setup": OptionSpec(str, "shell command to run in the project once on each node", "COMMAND"),
        "cluster_fetch": OptionSpec(
            str,
            "bring back files of the project that tests create or change on the nodes; may be repeated",
            "PATTERN",
            many=True,
        ),
        "cluster_env": OptionSpec(
            read_environment,
            "send only these environment variables to the nodes, or with dashes, all but these; names or patterns "
            "(default: all but those that describe this machine or look like secrets)",
            "NAME,...|-NAME,...",
            dashed=True,
        ),
        "cluster_only": OptionSpec(
            str, "use only nodes with this name, address or label of Ray", "NAME|LABEL=VALUE", many=True
        ),
        "cluster_not": OptionSpec(
            str, "use no node with this name, address or label of Ray", "NAME|LABEL=VALUE", many=True
        ),
    },
    "execution": {
        "timeout": OptionSpec(read_seconds, "time limit per test, unless @timeout overrides it", "SECONDS"),
        "slow": OptionSpec(read_seconds, "report a test that is still running after this time", "SECONDS"),
        "retries": OptionSpec(count_or_zero, "retry a failed test up to N times", "N"),
        "flaky": OptionSpec(
            one_of(CountAs), "whether a test that passes on a retry counts as passed or failed", "pass|fail"
        ),
        "leaked": OptionSpec(
            one_of(CountAs),
            "whether a test that passes but leaves processes running counts as passed or failed",
            "pass|fail",
        ),
        "max_fail": OptionSpec(count, "start no new tests after N failures", "N"),
        "repeat": OptionSpec(count, "run every test N times", "N"),
        "until_failure": OptionSpec(read_boolean, "repeat until a test fails (at most --repeat times, if given)"),
        "shuffle": OptionSpec(read_boolean, "randomise the order"),
        "seed": OptionSpec(count_or_zero, "seed for the random order; implies --shuffle", "N"),
    },
    "sanitizer": {
        "sanitize": OptionSpec(
            read_sanitizer_kinds,
            "check the collectives of ranks more closely; KINDS is a list such as calls,nan; --sanitize alone means "
            f"default; known are: {', '.join(KNOWN)}",
            "KINDS",
            alone="default",
        ),
        "sanitize_order": OptionSpec(
            one_of(OrderHazard),
            "whether a test passes whose ranks issue collectives of overlapping groups in opposite orders",
            "warn|fail",
        ),
        "shake": OptionSpec(
            count, "run every test N times, with random delays before collectives on chosen ranks", "N"
        ),
        "shake_seed": OptionSpec(
            count_or_zero,
            "seed of the delays of the first of --shake's runs, or of a single run; each further run has the next",
            "N",
        ),
    },
    "debugging": {
        "pdb": OptionSpec(
            read_boolean,
            "run one test at a time, without time limits, and let a debugger have the terminal where a test fails or "
            "calls breakpoint(), in any rank",
            configurable=False,
        ),
        "debug": OptionSpec(
            read_boolean, "likewise, and stop at the first line of each test, in the rank of --rank", configurable=False
        ),
        "rank": OptionSpec(count_or_zero, "the rank in which --debug stops", "N", configurable=False),
    },
    "output": {
        "verbosity": OptionSpec(
            one_of(Verbosity),
            values=(
                ValueFlag(("-v", "--verbose"), Verbosity.VERBOSE, "also print where each test ran"),
                ValueFlag(("-q", "--quiet"), Verbosity.QUIET, "print only failures and the summary"),
            ),
        ),
        "status_level": OptionSpec(
            one_of(StatusLevel),
            "print a line only for tests that end so, or worse: none, fail, retry, slow, leak, pass, skip, all",
            "LEVEL",
        ),
        "stream": OptionSpec(read_boolean, "show the output of tests while they run", also=("-s",)),
        "durations": OptionSpec(count_or_zero, "list the N slowest tests", "N"),
    },
    "reports": {
        "junit": OptionSpec(read_path, "write a JUnit XML report", "FILE"),
        "report": OptionSpec(read_path, "write an HTML report", "FILE", also=("--html",)),
        "trace": OptionSpec(read_path, "write a trace for Perfetto", "FILE"),
        "results": OptionSpec(read_path, "write all results as JSON", "FILE"),
        "journal": OptionSpec(
            read_path,
            "keep results here as they come (default: a folder for each run, in runs/ below the directory of --cache)",
            "FILE",
        ),
    },
    "other": {
        "action": OptionSpec(
            one_of(Action),
            values=(
                ValueFlag(("--list",), Action.LIST, "list the selected tests and what each needs; run nothing"),
                ValueFlag(
                    ("--dry-run",), Action.DRY_RUN, "print the planned schedule with devices and CPU slots; run nothing"
                ),
                ValueFlag(
                    ("--cluster-dry-run",),
                    Action.CLUSTER_DRY_RUN,
                    "print the files that --cluster would send to the nodes, and what it would leave out; run nothing",
                ),
                ValueFlag(
                    ("--show-config",),
                    Action.SHOW_CONFIG,
                    "print the value and the source of every option; run nothing",
                ),
            ),
            configurable=False,
        ),
        "allow_all_skipped": OptionSpec(
            read_boolean, "exit with 0 instead of 6 if everything was skipped: not enough devices"
        ),
        "json": OptionSpec(read_boolean, "with --list: print JSON", configurable=False),
        "cache": OptionSpec(read_path, "directory for recorded durations and failures", "DIR"),
        "drop_in": OptionSpec(
            read_path,
            "run a PyTorch checkout, or a folder or file of tests written for PyTorch's own classes, on the classes of "
            "this package; may be repeated; NAME selects among their tests",
            "PATH",
            many=True,
        ),
    },
}
for _group in OPTION_GROUPS.values():
    for _field, _spec in _group.items():
        if not _spec.values and _field != "names":
            _flags = (f"--{_field.replace('_', '-')}", *_spec.also)
            _group[_field] = replace(_spec, flags=tuple(sorted(_flags, key=lambda flag: flag.startswith("--"))))
OPTION_TABLE = {field: spec for group in OPTION_GROUPS.values() for field, spec in group.items()}
