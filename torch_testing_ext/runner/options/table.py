"""How each option is asked for: one table, from which the command line, its help and the configuration are made."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .options import Action, CountAs, Gpus, Rerun, ShardSpec, Verbosity

# -- readers: from the text of an option to its value; a ValueError says what would be understood


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{text!r} is not a whole number, {least} at least")
    return int(text)


def count(text: str) -> int:
    return _number(text, 1)


def count_or_none(text: str) -> int:
    return _number(text, 0)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return value


def shard(text: str) -> ShardSpec:
    index, slash, of = text.partition("/")
    if not (slash and index.isdecimal() and of.isdecimal() and 1 <= int(index) <= int(of)):
        raise ValueError(f"{text!r} is not a shard such as 1/3, the first of three")
    return ShardSpec(int(index), int(of))


def gpus(text: str) -> Gpus:
    if text == "auto":
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if "," not in text and text.isdecimal():
        return int(text)
    if not names or len(set(names)) < len(names) or "-1" in names:
        raise ValueError(f"{text!r} is not auto, a number of devices, or a list such as 0,2 (of one device: 0,)")
    return names


def truth(text: str) -> bool:
    known = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in known:
        raise ValueError(f"{text!r} is not true or false")
    return known[text.lower()]


def path(text: str) -> Path:
    if not text:
        raise ValueError("a path is missing")
    return Path(text).expanduser()


def one_of(kind: type[enum.Enum]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        known = [member.value for member in kind]
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return kind(text)

    return read


# -- the table


@dataclass(frozen=True)
class ValueFlag:
    """A flag that stands for one value of a closed set."""

    names: tuple[str, ...]
    value: enum.Enum
    help: str


@dataclass(frozen=True)
class OptionSpec:
    flags: tuple[str, ...]
    read: Callable[[str], Any]
    help: str = ""
    metavar: str = ""
    many: bool = False  # may be given several times
    several: bool = False  # each time with several values
    values: tuple[ValueFlag, ...] = ()
    configurable: bool = True  # in files and by environment too


OPTION_TABLE = {
    # what runs
    "names": OptionSpec(
        (),
        str,
        "files, folders, modules or prefixes of these, path::Class::test; everything where none is given",
        "NAME",
        many=True,
        configurable=False,
    ),
    "include": OptionSpec(("-i", "--include"), str, "as NAME above", "NAME", many=True, several=True),
    "exclude": OptionSpec(("-x", "--exclude"), str, "but not these", "NAME", many=True, several=True),
    "keyword": OptionSpec(
        ("-k", "--keyword"),
        str,
        "a part of a test's name, a pattern with *, or such words with and, or, not; of several one is enough",
        "EXPRESSION",
        many=True,
    ),
    "tests": OptionSpec(("--tests",), path, "where tests live", "FOLDER", many=True),
    "shard": OptionSpec(("--shard",), shard, "part I of N, cut by learnt durations, else by hash", "I/N"),
    "again": OptionSpec(
        (),
        one_of(Rerun),
        values=(
            ValueFlag(("--last-failed", "--lf"), Rerun.LAST_FAILED, "only what failed when it ran last"),
            ValueFlag(("--failed-first", "--ff"), Rerun.FAILED_FIRST, "first what failed when it ran last"),
        ),
    ),
    # with what
    "jobs": OptionSpec(("-j", "--jobs"), count, "CPU slots; each rank takes one", "N"),
    "gpus": OptionSpec(
        ("--gpus",), gpus, "so many accelerators, or these of the visible ones (0,2); auto: all of them", "N|LIST|auto"
    ),
    "fake_gpus": OptionSpec(("--fake-gpus",), count, "lease accelerators that do not exist", "N"),
    # how
    "timeout": OptionSpec(("--timeout",), seconds, "what a test may take, unless it says else by @timeout", "SECONDS"),
    "slow": OptionSpec(("--slow",), seconds, "announce a test that takes longer", "SECONDS"),
    "retries": OptionSpec(("--retries",), count_or_none, "try a failed test so often again", "N"),
    "flaky": OptionSpec(("--flaky",), one_of(CountAs), "what a test counts as that passes on retry", "pass|fail"),
    "leaked": OptionSpec(
        ("--leaked",), one_of(CountAs), "what a test counts as that passes but leaves processes running", "pass|fail"
    ),
    "max_fail": OptionSpec(("--max-fail",), count, "begin nothing more after so many failures", "N"),
    "repeat": OptionSpec(("--repeat",), count, "run every test so often", "N"),
    "until_failure": OptionSpec(("--until-failure",), truth, "repeat until a test fails (at most --repeat times)"),
    "shuffle": OptionSpec(("--shuffle",), truth, "begin in an order by chance"),
    "seed": OptionSpec(("--seed",), count_or_none, "of that order; implies --shuffle", "N"),
    # what is told
    "verbosity": OptionSpec(
        (),
        one_of(Verbosity),
        values=(
            ValueFlag(("-v", "--verbose"), Verbosity.VERBOSE, "say more"),
            ValueFlag(("-q", "--quiet"), Verbosity.QUIET, "say only failures and the end"),
        ),
    ),
    "stream": OptionSpec(("-s", "--stream"), truth, "show what tests print while they run"),
    "durations": OptionSpec(("--durations",), count_or_none, "name the slowest N tests", "N"),
    "junit": OptionSpec(("--junit",), path, "write JUnit XML", "FILE"),
    "report": OptionSpec(("--report",), path, "write an HTML page", "FILE"),
    "trace": OptionSpec(("--trace",), path, "write a trace for Perfetto", "FILE"),
    "results": OptionSpec(("--results",), path, "write all that is known as JSON", "FILE"),
    "allow_all_skipped": OptionSpec(
        ("--allow-all-skipped",), truth, "exit 0 where all was skipped for want of devices"
    ),
    # otherwise
    "action": OptionSpec(
        (),
        one_of(Action),
        values=(
            ValueFlag(("--list",), Action.LIST, "print what would run and what each test needs"),
            ValueFlag(("--dry-run",), Action.DRY_RUN, "print which units would begin when, and with which leases"),
            ValueFlag(("--show-config",), Action.SHOW_CONFIG, "print the options in force and where each comes from"),
        ),
        configurable=False,
    ),
    "json": OptionSpec(("--json",), truth, "with --list: for machines", configurable=False),
    "cache": OptionSpec(("--cache",), path, "where durations and failures are remembered", "FOLDER"),
    "drop_in": OptionSpec(
        ("--drop-in",), path, "a PyTorch checkout, or tests for PyTorch's bases, to run on ours", "PATH"
    ),
}
