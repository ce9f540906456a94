"""The options of a run, and the table that the command line and its help follow from."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import KNOWN, read_kinds
from torch_testing_ext._process import messages, project_settings, shell_words, system, user_commands
from torch_testing_ext._process.kept_failures import CACHE
from torch_testing_ext._process.project_settings import (
    count,
    count_or_zero,
    is_checkout,
    one_of,
    read_boolean,
    read_path,
    read_seconds,
    root_of_checkout,
)
from torch_testing_ext._process.terminal import NAME_OF_TEST, TERMINAL_VARIABLE, UserTerminal
from torch_testing_ext.faults import KINDS, Drill, fault_of_word

from .model import KnownFile, Policy

# --------------------------------------------------------------------------------------------------------------------
# The options of a run, as the rest of the runner reads them.


class UsageError(ValueError):
    """A mistake in the command line or the configuration; nothing runs."""


class CannotRun(RuntimeError):
    """No test can run; the message says why."""


class Warm(enum.Enum):
    """Whether a warm server forks the preloaded server."""

    # If one runs.
    AUTO = "auto"
    START = "on"
    NEVER = "off"


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
    LIST_AS_JSON = "list=json"
    DRY_RUN = "dry-run"
    SHOW_CONFIG = "show-config"

    @property
    def lists(self) -> bool:
        return self in (Action.LIST, Action.LIST_AS_JSON)


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


class DrillPoints(enum.Enum):
    """The points at which a drill tries its faults."""

    CALLS = "calls"
    STEPS = "steps"
    ALL = "all"


class DrillFail(enum.Enum):
    """The results that fail a test in a drill."""

    NOTHING = "nothing"
    HANG = "hang"


class Repeat(enum.Enum):
    """A number of repetitions that is not known before the run."""

    UNTIL_FAILURE = "until-failure"


class Shuffle(enum.Enum):
    """A random order without a seed of the user."""

    RANDOM = "random"


@dataclass(frozen=True)
class ShakeSpec:
    """Runs of every test with random delays. Each run has the seed after that of the run before it."""

    runs: int
    # The run chooses one, unless the user has.
    seed: int | None = None

    def __str__(self) -> str:
        return str(self.runs) if self.seed is None else f"{self.runs}:{self.seed}"


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
    # Of run_test.py: as PyTorch's.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    # As pytest's: beginnings of test ids.
    deselect: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    # option_sources.py finds the project's.
    tests: tuple[Path, ...] = ()
    shard: ShardSpec | None = None
    rerun: Rerun = Rerun.NOTHING
    # A revision of git.
    affected: str | None = None
    # Of the command `why`.
    why: tuple[str, ...] = ()
    watch: bool = False

    jobs: int = field(default_factory=system.cores)
    gpus: Gpus = None
    devices: str = project_settings.AUTO
    fake_accelerators: int | None = None
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
    slow_after: float = 30.0
    retries: int = 0
    flaky: CountAs = CountAs.PASS
    leaked: CountAs = CountAs.PASS
    maxfail: int | None = None
    repeat: int | Repeat | None = None
    shuffle: int | Shuffle | None = None

    sanitize: str | None = None
    sanitize_order: OrderHazard = OrderHazard.WARN
    shake: ShakeSpec | None = None
    world: int | None = None
    drill: str | None = None
    drill_points: DrillPoints = DrillPoints.CALLS
    drill_within: float = 10.0
    drill_fail: DrillFail = DrillFail.NOTHING
    drill_known: Path | KnownFile | None = None

    pdb: bool = False
    # Stop at the first line of each test.
    trace: bool = False
    debug_rank: int = 0

    verbosity: Verbosity = Verbosity.NORMAL
    status_level: StatusLevel = StatusLevel.ALL
    stream: bool = False
    durations: int = 5
    junitxml: Path | None = None
    html: Path | None = None
    perfetto: Path | None = None
    results: Path | None = None
    journal: Path | None = None
    allow_all_skipped: bool = False

    action: Action = Action.RUN
    cache: Path = Path(".torch_testing_ext")
    drop_in: tuple[Path, ...] = ()

    @property
    def drop_in_root(self) -> Path | None:
        """The folder to which the names of dropped-in tests are relative; None without any."""
        roots = {root_of_checkout(path) for path in self.drop_in}
        return Path(os.path.commonpath(roots)) if roots else None

    @property
    def planned_devices(self) -> int | None:
        """The number of devices to plan with, whatever there are: a schedule needs their number alone."""
        return self.fake_accelerators if self.action is Action.DRY_RUN else None

    @property
    def command(self) -> str:
        """The command that reruns a test whose name is appended to it."""
        words = [user_commands.runner()]
        if not self.drop_in:
            words += self._of_cache
        words += [f"-m {shell_words.quote(expression)}" for expression in self.marks]
        values = {"cluster": self.cluster, "fake-accelerators": self.fake_accelerators, "world": self.world}
        words += [f"--{name} {shell_words.quote(str(value))}" for name, value in values.items() if value is not None]
        if self.ranks_per_gpu > 1:
            words.append(f"--ranks-per-gpu {self.ranks_per_gpu}")
        root = self.drop_in_root
        places = (root,) if root is not None and is_checkout(root) else self.drop_in
        words += [f"--drop-in {shell_words.quote(str(place))}" for place in places]
        if self.sanitize is not None:
            words.append(f"--sanitize={self.sanitize}")
        if self.sanitize_order is OrderHazard.FAIL:
            words.append("-o sanitize-order=fail")
        if self.devices != project_settings.AUTO:
            words.append(f"-o devices={self.devices}")
        return " ".join([*words, *self._of_drill])

    @property
    def _of_drill(self) -> list[str]:
        if self.drill is None:
            return []
        of_drill = {field: getattr(self, field) for field in OPTION_TABLE if field.startswith("drill")}
        texts = {f: str(getattr(v, "value", v)) for f, v in of_drill.items() if v != getattr(Options, f)}
        return [f"{OPTION_TABLE[field].flags[0]} {shell_words.quote(text)}" for field, text in texts.items()]

    @property
    def show_command(self) -> str:
        """The command that shows all about the failure of a test of this run, whose name is appended to it."""
        words = [user_commands.runner(), user_commands.SHOW]
        if self.journal is None:
            words += self._of_cache
        else:
            words.append(f"--journal {shell_words.quote(os.path.relpath(self.journal))}")
        return " ".join(words)

    @property
    def _of_cache(self) -> list[str]:
        cache = os.path.relpath(self.cache)
        if cache == CACHE:
            return []
        return [f"--cache {shell_words.quote(cache)}"]

    def command_of(self, repetition: int, command: str | None = None) -> str:
        """The command, or another one, for a test of this repetition: with the delays that it has had."""
        if command is None:
            command = self.command
        seed = self._seed_of_delays(repetition)
        return command if seed is None else f"{command} --shake={ShakeSpec(1, seed)}"

    def _seed_of_delays(self, repetition: int) -> int | None:
        if self.shake is None or self.shake.seed is None:
            return None
        return self.shake.seed + repetition

    def environment_of_sanitizer(self, repetition: int) -> dict[str, str]:
        """The settings of the ranks that follow from the options of the sanitizer."""
        environ = {}
        if self.sanitize is not None:
            environ["TORCH_TESTING_EXT_SANITIZE"] = self.sanitize
        if self.sanitize_order is OrderHazard.FAIL:
            environ["TORCH_TESTING_EXT_SANITIZE_ORDER"] = "fail"
        seed = self._seed_of_delays(repetition)
        if seed is not None:
            environ["TORCH_TESTING_EXT_SHAKE"] = str(seed)
        if self.world is not None:
            environ["_TORCH_TESTING_EXT_WORLD"] = str(self.world)
        if self.perfetto is not None:
            environ["_TORCH_TESTING_EXT_LANES"] = "1"
        if self.drill is not None:
            points, fails = self.drill_points.value.removesuffix("s"), self.drill_fail is DrillFail.HANG
            faults = tuple(map(fault_of_word, self.drill.split(",")))
            drill = Drill(faults, points, self.drill_within, fails, getattr(self.drill_known, "hangs", ()))
            environ["_TORCH_TESTING_EXT_DRILL"] = json.dumps(messages.encode(drill))
        return environ

    def environment_of_debugger(self) -> dict[str, str]:
        """The settings by which processes of tests find the user's terminal, or know why they have none."""
        terminal = UserTerminal(why_not=f"run it with a debugger: {self.command} --pdb {NAME_OF_TEST}")
        if self.pdb:
            terminal = replace(UserTerminal.here(), stop_in=self.debug_rank if self.trace else None)
        return {TERMINAL_VARIABLE: terminal.written(), "TORCH_TESTING_EXT_DEBUG_RANK": ""}

    def require_terminal(self) -> None:
        """Raises UsageError if a debugger is wanted and has no terminal."""
        if not self.pdb:
            return
        why_not = UserTerminal.here().why_not
        if why_not:
            flag = "--trace" if self.trace else "--pdb"
            raise UsageError(f"{flag} cannot stop: {why_not}")

    @property
    def is_sent(self) -> bool:
        """Whether the project is sent to the nodes of a cluster."""
        return self.cluster not in (None, "slurm") and self.cluster_root is None

    @property
    def endless(self) -> bool:
        """Whether the run repeats until a test fails."""
        return self.repeat is Repeat.UNTIL_FAILURE

    @property
    def repetitions(self) -> int:
        """The number of repetitions that are planned when the run begins."""
        if self.shake is not None:
            return self.shake.runs
        return self.repeat if isinstance(self.repeat, int) else 1

    @property
    def policy(self) -> Policy:
        return Policy(fail_flaky=self.flaky is CountAs.FAIL, fail_leaked=self.leaked is CountAs.FAIL)


# --------------------------------------------------------------------------------------------------------------------
# The option table: the command line, its help and the configuration files all follow from it.

# -- readers: convert the text of an option to its value; the message of a ValueError says what is valid


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
        raise ValueError(f"{text!r} is not a list of names such as A,B_* (only these) or -A,-B_* (all but these)")
    return ",".join(names)


def read_repeat(text: str) -> int | Repeat:
    """A number of repetitions, or `until-failure`."""
    return Repeat.UNTIL_FAILURE if text == Repeat.UNTIL_FAILURE.value else count(text)


def read_shuffle(text: str) -> int | Shuffle | None:
    """`random`, a seed, or whether to shuffle at all."""
    if text.isdecimal():
        return int(text)
    if text == Shuffle.RANDOM.value:
        return Shuffle.RANDOM
    try:
        return Shuffle.RANDOM if read_boolean(text) else None
    except ValueError:
        raise ValueError(f"{text!r} is not a seed, true or false") from None


def read_shake(text: str) -> ShakeSpec:
    """A number of runs, and the seed of the first of them: `20` or `20:7`."""
    runs, colon, seed = text.partition(":")
    if not runs.isdecimal() or int(runs) < 1 or (colon and not seed.isdecimal()):
        raise ValueError(f"{text!r} is not a number of runs such as 20, or runs and a seed such as 20:7")
    return ShakeSpec(int(runs), int(seed) if colon else None)


def read_drill(text: str) -> str:
    """Faults, separated by commas, with their values behind a colon: `kill,stop:2`."""
    words = text.replace(" ", "").split(",")
    for word in words:
        fault_of_word(word)
    return ",".join(dict.fromkeys(words))


def read_sanitizer_kinds(text: str) -> str:
    """Kinds of checks of the sanitizer, separated by commas."""
    read_kinds(text)
    return text


# -- the table


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
    # All of them, unless it is an argument without a flag or has only flags for its values.
    flags: tuple[str, ...] = ()


# By the title of a group in --help, then by the field of Options.
OPTION_GROUPS = {
    "selection": {
        "names": OptionSpec(
            str,
            "file, directory, module, or the beginning of its name; path::Class::test is one test",
            "NAME",
            many=True,
            configurable=False,
        ),
        "include": OptionSpec(
            str,
            "the same as NAME",
            "NAME",
            Level.OF_COMMANDS,
            many=True,
            configurable=False,
            of_pytorch=("-i", "--include"),
        ),
        "exclude": OptionSpec(
            str, "do not run these tests; may be repeated", "NAME", many=True, of_pytorch=("-x", "--exclude")
        ),
        "deselect": OptionSpec(str, "do not run tests whose id begins with ID; may be repeated", "ID", many=True),
        "keyword": OptionSpec(
            str,
            "run only tests whose names match, such as 'ddp and not slow_*'; may be repeated",
            "EXPR",
            many=True,
            also=("-k",),
        ),
        "marks": OptionSpec(
            str, "run only tests whose marks match, such as 'not slow'", "EXPR", many=True, also=("-m",)
        ),
        "tests": OptionSpec(
            read_path,
            "directories to search for tests (default: pytest's testpaths, else test and tests)",
            "DIR",
            Level.SETTING,
            many=True,
        ),
        "shard": OptionSpec(read_shard, "run part I of N, balanced by duration", "I/N"),
        "rerun": OptionSpec(
            one_of(Rerun),
            values=(
                ValueFlag(
                    ("--lf", "--last-failed"), Rerun.LAST_FAILED, "run only the tests that failed in their last run"
                ),
                ValueFlag(
                    ("--ff", "--failed-first"),
                    Rerun.FAILED_FIRST,
                    "run tests that failed in their last run first",
                ),
            ),
        ),
        "affected": OptionSpec(
            str,
            "run only tests whose files have changed since their last run or the last commit (or REV)",
            "REV",
            configurable=False,
            alone="HEAD",
        ),
        "why": OptionSpec(str, "the tests to explain", "TEST", Level.OF_COMMANDS, many=True, configurable=False),
        "watch": OptionSpec(read_boolean, "run the affected tests each time you save a file", configurable=False),
    },
    "resources": {
        "jobs": OptionSpec(count, "run up to N ranks at once on the CPU (default: one per core)", "N", also=("-j",)),
        "gpus": OptionSpec(
            read_gpus, "use N accelerators, or those of a list such as 0,2 (default: auto, all)", "N|LIST"
        ),
        "devices": OptionSpec(
            project_settings.read_devices,
            "devices of tests that name none: an accelerator for each rank if there are enough, else the CPU; or "
            "always the CPU",
            "auto|cpu",
            Level.SETTING,
        ),
        "fake_accelerators": OptionSpec(
            count, "emulate N accelerators on the CPU; with --dry-run, plan for N of them", "N"
        ),
        "ranks_per_gpu": OptionSpec(
            count, "let up to N ranks share a GPU if a test needs more GPUs than there are", "N", Level.HELP_ALL
        ),
        "shared_leases": OptionSpec(
            read_boolean, "do not use accelerators that your other runs on this machine use", level=Level.SETTING
        ),
        "memory_check": OptionSpec(
            read_boolean,
            "after a test, wait until its accelerators have their memory back; stop using those that do not",
            level=Level.SETTING,
        ),
        "lease_folder": OptionSpec(
            read_path,
            "directory of the lock files with which runs share accelerators (default: one per user, below /tmp)",
            "DIR",
            Level.SETTING,
        ),
        "warm": OptionSpec(
            one_of(Warm),
            "use a server that has imported torch, and keep it for later runs (default: auto, use one that runs)",
            "auto|on|off",
            alone=Warm.START.value,
        ),
    },
    "cluster": {
        "cluster": OptionSpec(
            read_cluster, "use a cluster: slurm, or Ray at auto, HOST:PORT or ray://HOST:PORT", "ADDRESS"
        ),
        "cluster_nodes": OptionSpec(count, "use N nodes (default: all that are free)", "N"),
        "cluster_gpus_per_node": OptionSpec(
            count, "use N accelerators of each node (default: all that are free)", "N", Level.SETTING
        ),
        "cluster_fake_gpus": OptionSpec(
            read_boolean,
            "treat the GPUs that Ray reports as fake, to try a cluster without GPUs",
            level=Level.SETTING,
        ),
        "cluster_timeout": OptionSpec(
            read_seconds, "wait this long for nodes that are in use", "SECONDS", Level.SETTING
        ),
        "cluster_root": OptionSpec(
            read_path,
            "the project's path on each node, on a shared file system (default: send the project to the nodes)",
            "PATH",
            Level.SETTING,
        ),
        "cluster_setup": OptionSpec(
            str, "run this shell command in the project, once on each node", "COMMAND", Level.SETTING
        ),
        "cluster_fetch": OptionSpec(
            str,
            "bring back these files when tests create or change them on the nodes",
            "PATTERN",
            Level.SETTING,
            many=True,
        ),
        "cluster_env": OptionSpec(
            read_environment,
            "send only these environment variables to the nodes (A,B_*), or all but these (-A,-B_*) (default: all but "
            "those that belong to this machine or look like secrets)",
            "NAME,...",
            Level.SETTING,
        ),
        "cluster_only": OptionSpec(
            str, "use only nodes with this name, address or Ray label", "NAME|LABEL=VALUE", Level.SETTING, many=True
        ),
        "cluster_not": OptionSpec(
            str, "use no node with this name, address or Ray label", "NAME|LABEL=VALUE", Level.SETTING, many=True
        ),
    },
    "execution": {
        "maxfail": OptionSpec(
            count,
            "stop after N failures",
            "N",
            also=("--max-fail",),
            values=(ValueFlag(("-x", "--exitfirst", "--fail-fast"), 1, "stop after the first failure"),),
        ),
        "timeout": OptionSpec(read_seconds, "time limit of each test that does not set its own", "SECONDS"),
        "slow_after": OptionSpec(
            read_seconds, "report tests that are still running after this time", "SECONDS", Level.SETTING
        ),
        "retries": OptionSpec(count_or_zero, "retry a failed test up to N times", "N", also=("--reruns",)),
        "flaky": OptionSpec(
            one_of(CountAs),
            "count a test that passes on a retry as passed or failed",
            "pass|fail",
            Level.HELP_ALL,
        ),
        "leaked": OptionSpec(
            one_of(CountAs),
            "count a test that passes but leaves processes running as passed or failed",
            "pass|fail",
            Level.SETTING,
        ),
        "repeat": OptionSpec(
            read_repeat, "run every test N times, or until one fails", "N|until-failure", also=("--stress-count",)
        ),
        "shuffle": OptionSpec(
            read_shuffle, "run tests in random order, repeatable by a SEED", "SEED", alone=Shuffle.RANDOM.value
        ),
    },
    "sanitizer": {
        "sanitize": OptionSpec(
            read_sanitizer_kinds,
            f"check collectives more closely: {', '.join(KNOWN)}",
            "KINDS",
            alone="default",
        ),
        "sanitize_order": OptionSpec(
            one_of(OrderHazard),
            "warn or fail if ranks issue collectives of overlapping groups in opposite orders",
            "warn|fail",
            Level.SETTING,
        ),
        "shake": OptionSpec(read_shake, "run every test N times, with random delays", "N[:SEED]"),
        "world": OptionSpec(count, "run tests in ranks as whole worlds of N ranks", "N"),
    },
    "faults": {
        "drill": OptionSpec(
            read_drill, f"try faults at every call of tests: {', '.join(KINDS)}", "FAULT[:VALUE],...", Level.HELP_ALL
        ),
        "drill_points": OptionSpec(one_of(DrillPoints), "where", "calls|steps|all", Level.HELP_ALL),
        "drill_within": OptionSpec(read_seconds, "what goes on so long after a fault hangs", "SECONDS", Level.HELP_ALL),
        "drill_fail": OptionSpec(one_of(DrillFail), "what fails a test", "nothing|hang", Level.HELP_ALL),
        "drill_known": OptionSpec(read_path, "a TOML file with the hangs that are known", "FILE", Level.HELP_ALL),
    },
    "debugging": {
        "pdb": OptionSpec(
            read_boolean,
            "open pdb where a test fails or calls breakpoint(), in any rank",
            configurable=False,
        ),
        "trace": OptionSpec(read_boolean, "open pdb at the start of each test, in one rank", configurable=False),
        "debug_rank": OptionSpec(count_or_zero, "the rank that --trace stops", "RANK", configurable=False),
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
            "print a line for tests with this result or a worse one: none, fail, retry, slow, leak, pass, skip, all",
            "LEVEL",
            Level.SETTING,
        ),
        "stream": OptionSpec(read_boolean, "show the output of tests while they run", also=("-s", "--no-capture")),
        "durations": OptionSpec(count_or_zero, "list the N slowest tests", "N"),
    },
    "reports": {
        "junitxml": OptionSpec(read_path, "write a JUnit XML report", "FILE", also=("--junit-xml",)),
        "html": OptionSpec(read_path, "write an HTML report", "FILE"),
        "perfetto": OptionSpec(read_path, "write a timeline for Perfetto", "FILE"),
        "results": OptionSpec(read_path, "write all results as JSON", "FILE"),
        "journal": OptionSpec(
            read_path,
            "file for the results, written as they come in (default: runs/TIME-PID/journal.jsonl in --cache)",
            "FILE",
            Level.SETTING,
        ),
    },
    "other": {
        "action": OptionSpec(
            one_of(Action),
            values=(
                ValueFlag(("--list", "--collect-only", "--co"), Action.LIST, "list the tests, and run nothing"),
                ValueFlag(("--list=json",), Action.LIST_AS_JSON, "list the tests as JSON"),
                ValueFlag(
                    ("--dry-run",),
                    Action.DRY_RUN,
                    "print the schedule (with --cluster, what is sent), and run nothing",
                ),
                ValueFlag(("--show-config",), Action.SHOW_CONFIG, "print the value and the source of every option"),
            ),
            configurable=False,
        ),
        "allow_all_skipped": OptionSpec(
            read_boolean,
            "exit with 0 instead of 6 if all tests were skipped for lack of devices",
            level=Level.SETTING,
        ),
        "cache": OptionSpec(read_path, "directory for results and durations", "DIR", Level.HELP_ALL),
        "drop_in": OptionSpec(
            read_path,
            "run PyTorch's own tests: a checkout, folder or file; may be repeated",
            "PATH",
            many=True,
        ),
    },
}
for _group in OPTION_GROUPS.values():
    for _field, _spec in _group.items():
        _is_flag = _spec.read is read_boolean or _spec.metavar
        if _is_flag and _field not in ("names", "include", "why"):
            _flags = (f"--{_field.replace('_', '-')}", *_spec.also)
            _group[_field] = replace(_spec, flags=tuple(sorted(_flags, key=lambda flag: flag.startswith("--"))))
OPTION_TABLE = {field: spec for group in OPTION_GROUPS.values() for field, spec in group.items()}
