"""The option table: the command line, its help and the configuration files all follow from it."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._sanitizer.kinds import KNOWN, read_kinds

from .options import Action, CountAs, Gpus, OrderHazard, Rerun, ShardSpec, Verbosity

# -- readers: convert the text of an option to its value; the message of a ValueError says what is valid


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _number(text, 1)


def count_or_zero(text: str) -> int:
    """A whole number of at least 0."""
    return _number(text, 0)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a positive number of seconds")
    return value


def shard(text: str) -> ShardSpec:
    index, slash, total = text.partition("/")
    if not (slash and index.isdecimal() and total.isdecimal() and 1 <= int(index) <= int(total)):
        raise ValueError(f"{text!r} is not a shard: write I/N, such as 1/3 for the first of three")
    return ShardSpec(int(index), int(total))


def gpus(text: str) -> Gpus:
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


def cluster(text: str) -> str:
    """`auto`, `slurm`, or the address of a Ray cluster."""
    host, _, port = text.removeprefix("ray://").rpartition(":")
    if text in ("auto", "slurm") or (host and port.isdecimal() and int(port) < 1 << 16):
        return text
    raise ValueError(f"{text!r} is not auto, slurm, HOST:PORT or ray://HOST:PORT")


def boolean(text: str) -> bool:
    known = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in known:
        raise ValueError(f"{text!r} is not true or false")
    return known[text.lower()]


def kinds(text: str) -> str:
    """Kinds of checks of the sanitizer, separated by commas."""
    read_kinds(text)
    return text


def path(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    return Path(text).expanduser()


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

    flags: tuple[str, ...]
    read: Callable[[str], Any]
    help: str = ""
    metavar: str = ""
    many: bool = False  # the option may be given several times
    several: bool = False  # each time with several values
    values: tuple[ValueFlag, ...] = ()
    configurable: bool = True  # also in configuration files and the environment
    alone: str = ""  # the value that the flag alone means


# By the title of a group in --help, then by the field of Options.
OPTION_GROUPS = {
    "selection": {
        "names": OptionSpec(
            (),
            str,
            "file, directory, module, or a prefix of one; path::Class::test selects a single test (default: all tests)",
            "NAME",
            many=True,
            configurable=False,
        ),
        "include": OptionSpec(("-i", "--include"), str, "same as NAME, as an option", "NAME", many=True, several=True),
        "exclude": OptionSpec(
            ("-x", "--exclude"), str, "do not run these; same syntax as NAME", "NAME", many=True, several=True
        ),
        "keyword": OptionSpec(
            ("-k", "--keyword"),
            str,
            "run only tests whose name contains a word or matches a pattern with *; combine words with and, or, not "
            "and parentheses; if given several times, one match is enough",
            "EXPRESSION",
            many=True,
        ),
        "marks": OptionSpec(
            ("-m", "--marks"),
            str,
            "run only tests whose marks of pytest match; combine names of marks with and, or, not and parentheses; if "
            "given several times, one match is enough",
            "EXPRESSION",
            many=True,
        ),
        "tests": OptionSpec(("--tests",), path, "directory to search for tests; may be repeated", "DIR", many=True),
        "shard": OptionSpec(
            ("--shard",), shard, "run part I of N, split by recorded durations, or by hash if there are none", "I/N"
        ),
        "rerun": OptionSpec(
            (),
            one_of(Rerun),
            values=(
                ValueFlag(("--last-failed", "--lf"), Rerun.LAST_FAILED, "run only tests that failed in their last run"),
                ValueFlag(
                    ("--failed-first", "--ff"), Rerun.FAILED_FIRST, "run tests that failed in their last run first"
                ),
            ),
        ),
    },
    "resources": {
        "jobs": OptionSpec(
            ("-j", "--jobs"), count, "number of CPU slots; each rank takes one (default: one per usable core)", "N"
        ),
        "gpus": OptionSpec(
            ("--gpus",),
            gpus,
            "number of accelerators to use, or a list of visible ones such as 0,2 (default: auto, all of them)",
            "N|LIST|auto",
        ),
        "fake_gpus": OptionSpec(("--fake-gpus",), count, "schedule tests on N accelerators that do not exist", "N"),
        "ranks_per_gpu": OptionSpec(
            ("--ranks-per-gpu",),
            count,
            "let up to N ranks share each GPU, for tests that need more of them than there are",
            "N",
        ),
        "shared_leases": OptionSpec(
            ("--shared-leases",), boolean, "use no accelerator that another run of this user on this machine uses"
        ),
        "lease_folder": OptionSpec(
            ("--lease-folder",),
            path,
            "directory of the files by which runs share accelerators (default: one per user, below /tmp)",
            "DIR",
        ),
    },
    "cluster": {
        "cluster": OptionSpec(
            ("--cluster",),
            cluster,
            "run on the nodes of a Ray cluster: auto, HOST:PORT or ray://HOST:PORT; or of Slurm, in the allocation "
            "that is there or in one of its own: slurm",
            "ADDRESS",
        ),
        "cluster_nodes": OptionSpec(
            ("--cluster-nodes",),
            count,
            "number of nodes to use (default: all that are free; with Slurm, all of the allocation, or one of its own)",
            "N",
        ),
        "cluster_gpus_per_node": OptionSpec(
            ("--cluster-gpus-per-node",),
            count,
            "number of accelerators to use of each node (default: all that are free)",
            "N",
        ),
        "cluster_fake_gpus": OptionSpec(
            ("--cluster-fake-gpus",),
            boolean,
            "take the accelerators that Ray names for fake ones, to try a cluster that has none",
        ),
        "cluster_timeout": OptionSpec(
            ("--cluster-timeout",), seconds, "how long to wait for nodes that are in use", "SECONDS"
        ),
        "cluster_root": OptionSpec(
            ("--cluster-root",),
            path,
            "the project's path on every node, on a shared file system (default: the project is sent to the nodes)",
            "PATH",
        ),
        "cluster_setup": OptionSpec(
            ("--cluster-setup",), str, "shell command to run in the project once on each node", "COMMAND"
        ),
    },
    "execution": {
        "timeout": OptionSpec(("--timeout",), seconds, "time limit per test, unless @timeout overrides it", "SECONDS"),
        "slow": OptionSpec(("--slow",), seconds, "report a test that is still running after this time", "SECONDS"),
        "retries": OptionSpec(("--retries",), count_or_zero, "retry a failed test up to N times", "N"),
        "flaky": OptionSpec(
            ("--flaky",),
            one_of(CountAs),
            "whether a test that passes on a retry counts as passed or failed",
            "pass|fail",
        ),
        "leaked": OptionSpec(
            ("--leaked",),
            one_of(CountAs),
            "whether a test that passes but leaves processes running counts as passed or failed",
            "pass|fail",
        ),
        "max_fail": OptionSpec(("--max-fail",), count, "start no new tests after N failures", "N"),
        "repeat": OptionSpec(("--repeat",), count, "run every test N times", "N"),
        "until_failure": OptionSpec(
            ("--until-failure",), boolean, "repeat until a test fails (at most --repeat times, if given)"
        ),
        "shuffle": OptionSpec(("--shuffle",), boolean, "randomise the order"),
        "seed": OptionSpec(("--seed",), count_or_zero, "seed for the random order; implies --shuffle", "N"),
    },
    "sanitizer": {
        "sanitize": OptionSpec(
            ("--sanitize",),
            kinds,
            "check the collectives of ranks more closely; KINDS is a list such as calls,nan; --sanitize alone means "
            f"default; known are: {', '.join(KNOWN)}",
            "KINDS",
            alone="default",
        ),
        "sanitize_order": OptionSpec(
            ("--sanitize-order",),
            one_of(OrderHazard),
            "whether a test passes whose ranks issue collectives of overlapping groups in opposite orders",
            "warn|fail",
        ),
        "shake": OptionSpec(
            ("--shake",), count, "run every test N times, with random delays before collectives on chosen ranks", "N"
        ),
        "shake_seed": OptionSpec(
            ("--shake-seed",),
            count_or_zero,
            "seed of the delays of the first of --shake's runs, or of a single run; each further run has the next",
            "N",
        ),
    },
    "output": {
        "verbosity": OptionSpec(
            (),
            one_of(Verbosity),
            values=(
                ValueFlag(("-v", "--verbose"), Verbosity.VERBOSE, "also print where each test ran"),
                ValueFlag(("-q", "--quiet"), Verbosity.QUIET, "print only failures and the summary"),
            ),
        ),
        "stream": OptionSpec(("-s", "--stream"), boolean, "show the output of tests while they run"),
        "durations": OptionSpec(("--durations",), count_or_zero, "list the N slowest tests", "N"),
    },
    "reports": {
        "junit": OptionSpec(("--junit",), path, "write a JUnit XML report", "FILE"),
        "report": OptionSpec(("--report", "--html"), path, "write an HTML report", "FILE"),
        "trace": OptionSpec(("--trace",), path, "write a trace for Perfetto", "FILE"),
        "results": OptionSpec(("--results",), path, "write all results as JSON", "FILE"),
        "journal": OptionSpec(
            ("--journal",),
            path,
            "keep results here as they come (default: a folder for each run, in runs/ below the directory of --cache)",
            "FILE",
        ),
    },
    "other": {
        "action": OptionSpec(
            (),
            one_of(Action),
            values=(
                ValueFlag(("--list",), Action.LIST, "list the selected tests and what each needs; run nothing"),
                ValueFlag(
                    ("--dry-run",), Action.DRY_RUN, "print the planned schedule with devices and CPU slots; run nothing"
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
            ("--allow-all-skipped",),
            boolean,
            "exit with 0 instead of 6 if everything was skipped: not enough devices",
        ),
        "json": OptionSpec(("--json",), boolean, "with --list: print JSON", configurable=False),
        "cache": OptionSpec(("--cache",), path, "directory for recorded durations and failures", "DIR"),
        "drop_in": OptionSpec(
            ("--drop-in",),
            path,
            "run a PyTorch checkout, or a folder or file of tests written for PyTorch's own classes, on the classes of "
            "this package; may be repeated; NAME selects among their tests",
            "PATH",
            many=True,
        ),
    },
}
OPTION_TABLE = {field: spec for group in OPTION_GROUPS.values() for field, spec in group.items()}
