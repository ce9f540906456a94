"""How each option is asked for: one table, from which the command line, its help and the configuration are made."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .options import Action, Again, CountAs, Gpus, Shard, Verbosity

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


def shard(text: str) -> Shard:
    index, slash, of = text.partition("/")
    if not (slash and index.isdecimal() and of.isdecimal() and 1 <= int(index) <= int(of)):
        raise ValueError(f"{text!r} is not a shard such as 1/3, the first of three")
    return Shard(int(index), int(of))


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
class Flag:
    """A flag that stands for one value of a closed set."""

    names: tuple[str, ...]
    value: enum.Enum
    help: str


@dataclass(frozen=True)
class Switch:
    flags: tuple[str, ...]
    read: Callable[[str], Any]
    help: str = ""
    metavar: str = ""
    many: bool = False  # may be given several times
    several: bool = False  # each time with several values
    values: tuple[Flag, ...] = ()
    configurable: bool = True  # in files and by environment too


SWITCHES = {
    # what runs
    "names": Switch(
        (),
        str,
        "files, folders, modules or prefixes of these, path::Class::test; everything where none is given",
        "NAME",
        many=True,
        configurable=False,
    ),
    "include": Switch(("-i", "--include"), str, "as NAME above", "NAME", many=True, several=True),
    "exclude": Switch(("-x", "--exclude"), str, "but not these", "NAME", many=True, several=True),
    "keyword": Switch(
        ("-k", "--keyword"),
        str,
        "a part of a test's name, a pattern with *, or such words with and, or, not; of several one is enough",
        "EXPRESSION",
        many=True,
    ),
    "tests": Switch(("--tests",), path, "where tests live", "FOLDER", many=True),
    "shard": Switch(("--shard",), shard, "part I of N, cut by learnt durations, else by hash", "I/N"),
    "again": Switch(
        (),
        one_of(Again),
        values=(
            Flag(("--last-failed", "--lf"), Again.LAST_FAILED, "only what failed when it ran last"),
            Flag(("--failed-first", "--ff"), Again.FAILED_FIRST, "first what failed when it ran last"),
        ),
    ),
    # with what
    "jobs": Switch(("-j", "--jobs"), count, "CPU slots; each rank takes one", "N"),
    "gpus": Switch(
        ("--gpus",), gpus, "so many accelerators, or these of the visible ones (0,2); auto: all of them", "N|LIST|auto"
    ),
    "fake_gpus": Switch(("--fake-gpus",), count, "lease accelerators that do not exist", "N"),
    # how
    "timeout": Switch(("--timeout",), seconds, "what a test may take, unless it says else by @timeout", "SECONDS"),
    "slow": Switch(("--slow",), seconds, "announce a test that takes longer", "SECONDS"),
    "retries": Switch(("--retries",), count_or_none, "try a failed test so often again", "N"),
    "flaky": Switch(("--flaky",), one_of(CountAs), "what a test counts as that passes on retry", "pass|fail"),
    "leaked": Switch(
        ("--leaked",), one_of(CountAs), "what a test counts as that passes but leaves processes running", "pass|fail"
    ),
    "max_fail": Switch(("--max-fail",), count, "begin nothing more after so many failures", "N"),
    "repeat": Switch(("--repeat",), count, "run every test so often", "N"),
    "until_failure": Switch(("--until-failure",), truth, "repeat until a test fails (at most --repeat times)"),
    "shuffle": Switch(("--shuffle",), truth, "begin in an order by chance"),
    "seed": Switch(("--seed",), count_or_none, "of that order; implies --shuffle", "N"),
    # what is told
    "verbosity": Switch(
        (),
        one_of(Verbosity),
        values=(
            Flag(("-v", "--verbose"), Verbosity.VERBOSE, "say more"),
            Flag(("-q", "--quiet"), Verbosity.QUIET, "say only failures and the end"),
        ),
    ),
    "stream": Switch(("-s", "--stream"), truth, "show what tests print while they run"),
    "durations": Switch(("--durations",), count_or_none, "name the slowest N tests", "N"),
    "junit": Switch(("--junit",), path, "write JUnit XML", "FILE"),
    "report": Switch(("--report",), path, "write an HTML page", "FILE"),
    "trace": Switch(("--trace",), path, "write a trace for Perfetto", "FILE"),
    "results": Switch(("--results",), path, "write all that is known as JSON", "FILE"),
    "allow_all_skipped": Switch(("--allow-all-skipped",), truth, "exit 0 where all was skipped for want of devices"),
    # otherwise
    "action": Switch(
        (),
        one_of(Action),
        values=(
            Flag(("--list",), Action.LIST, "print what would run and what each test needs"),
            Flag(("--dry-run",), Action.DRY_RUN, "print which units would begin when, and with which leases"),
            Flag(("--show-config",), Action.SHOW_CONFIG, "print the options in force and where each comes from"),
        ),
        configurable=False,
    ),
    "json": Switch(("--json",), truth, "with --list: for machines", configurable=False),
    "cache": Switch(("--cache",), path, "where durations and failures are remembered", "FOLDER"),
    "drop_in": Switch(("--drop-in",), path, "a PyTorch checkout, or tests for PyTorch's bases, to run on ours", "PATH"),
}
