"""What a user may ask for: one table, from which the command line, the configuration and the help are made."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Again(enum.Enum):
    """What the failures of the last run are to this one."""

    NOTHING = "nothing"
    LAST_FAILED = "last-failed"  # run these alone
    FAILED_FIRST = "failed-first"


class Action(enum.Enum):
    RUN = "run"
    LIST = "list"
    DRY_RUN = "dry-run"
    SHOW_CONFIG = "show-config"


class Verbosity(enum.Enum):
    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


class CountAs(enum.Enum):
    """What a test that passed, though not well, counts as."""

    PASS = "pass"
    FAIL = "fail"


class Shard(NamedTuple):
    index: int  # from 1
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


Gpus = int | tuple[str, ...] | None  # so many, just these, or all there are


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
    if not names or len(set(names)) < len(names):
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
class Switch:
    """How a field of Options is asked for. `values` are flags of their own for the values of an enum."""

    flags: tuple[str, ...]
    read: Callable[[str], Any]
    help: str
    metavar: str = ""
    many: bool = False  # may be given several times
    several: bool = False  # takes several values at once
    values: tuple[tuple[tuple[str, ...], Any, str], ...] = ()
    configurable: bool = True  # in files and by environment too


def switch(*flags: str, default: Any, read: Callable[[str], Any] = str, help: str, **more: Any) -> Any:
    metadata = {"switch": Switch(flags, read, help, **more)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_VALUES: dict[type[enum.Enum], tuple[tuple[tuple[str, ...], Any, str], ...]] = {
    Again: (
        (("--last-failed", "--lf"), Again.LAST_FAILED, "only what failed when it ran last"),
        (("--failed-first", "--ff"), Again.FAILED_FIRST, "what failed when it ran last, then the rest"),
    ),
    Action: (
        (("--list",), Action.LIST, "print what would run and what each test needs, and run nothing"),
        (("--dry-run",), Action.DRY_RUN, "print which units would begin in which order with which leases, and run nothing"),
        (("--show-config",), Action.SHOW_CONFIG, "print the options in force and where each comes from, and run nothing"),
    ),
    Verbosity: (
        (("-v", "--verbose"), Verbosity.VERBOSE, "say more"),
        (("-q", "--quiet"), Verbosity.QUIET, "only failures and the end"),
    ),
}


@dataclass(frozen=True)
class Options:
    # what runs
    names: tuple[str, ...] = switch(
        default=(),
        many=True,
        configurable=False,
        metavar="NAME",
        help="files, folders, modules or prefixes of these, path::Class::test; everything where none is given",
    )
    include: tuple[str, ...] = switch("-i", "--include", default=(), many=True, several=True, metavar="NAME", help="as NAME above")
    exclude: tuple[str, ...] = switch("-x", "--exclude", default=(), many=True, several=True, metavar="NAME", help="but not these")
    keyword: tuple[str, ...] = switch(
        "-k",
        default=(),
        many=True,
        metavar="EXPRESSION",
        help="a part of a test's name, a pattern with *, or such words with and, or, not; of several one is enough",
    )
    tests: tuple[Path, ...] = switch(
        "--tests", default=(Path("test/distributed"),), read=path, many=True, metavar="FOLDER", help="where tests live"
    )
    shard: Shard | None = switch(
        "--shard", default=None, read=shard, metavar="I/N", help="part I of N; by learnt durations, else by hash"
    )
    again: Again = switch(
        default=Again.NOTHING, read=one_of(Again), values=_VALUES[Again], help="what failed in the last run is to this"
    )
    # with what
    jobs: int = switch("-j", "--jobs", default=usable_cores, read=count, metavar="N", help="CPU slots; a rank takes one")
    gpus: Gpus = switch(
        "--gpus",
        default=None,
        read=gpus,
        metavar="N|LIST|auto",
        help="so many accelerators, or these of the visible ones (0,2); auto: all that are visible",
    )
    fake_gpus: int | None = switch(
        "--fake-gpus", default=None, read=count, metavar="N", help="lease accelerators that do not exist"
    )
    # how
    timeout: float = switch(
        "--timeout",
        default=300.0,
        read=seconds,
        metavar="SECONDS",
        help="a test may take, unless it says else by @timeout",
    )
    slow: float = switch(
        "--slow", default=30.0, read=seconds, metavar="SECONDS", help="a test that takes longer is announced"
    )
    retries: int = switch(
        "--retries", default=0, read=count_or_none, metavar="N", help="try a failed test so often again"
    )
    flaky: CountAs = switch(
        "--flaky",
        default=CountAs.PASS,
        read=one_of(CountAs),
        metavar="pass|fail",
        help="what a test counts as that passes when tried again",
    )
    leaked: CountAs = switch(
        "--leaked",
        default=CountAs.PASS,
        read=one_of(CountAs),
        metavar="pass|fail",
        help="what a test counts as that passes and leaves processes running",
    )
    max_fail: int | None = switch(
        "--max-fail", default=None, read=count, metavar="N", help="begin nothing more after so many failures"
    )
    repeat: int | None = switch("--repeat", default=None, read=count, metavar="N", help="run every test so often")
    until_failure: bool = switch(
        "--until-failure", default=False, read=truth, help="repeat until a test fails (with --repeat: so often at most)"
    )
    shuffle: bool = switch("--shuffle", default=False, read=truth, help="begin in an order by chance")
    seed: int | None = switch(
        "--seed", default=None, read=count_or_none, metavar="N", help="of that order; implies --shuffle"
    )
    # what is told
    verbosity: Verbosity = switch(
        default=Verbosity.NORMAL, read=one_of(Verbosity), values=_VALUES[Verbosity], help="how much is said"
    )
    stream: bool = switch("-s", "--stream", default=False, read=truth, help="show what tests print while they run")
    durations: int = switch("--durations", default=5, read=count_or_none, metavar="N", help="name the slowest N tests")
    junit: Path | None = switch("--junit", default=None, read=path, metavar="FILE", help="write JUnit XML")
    report: Path | None = switch("--report", default=None, read=path, metavar="FILE", help="write an HTML page")
    trace: Path | None = switch("--trace", default=None, read=path, metavar="FILE", help="write a trace for Perfetto")
    allow_all_skipped: bool = switch(
        "--allow-all-skipped", default=False, read=truth, help="exit 0 where all was skipped for want of devices"
    )
    # otherwise
    action: Action = switch(
        default=Action.RUN, read=one_of(Action), values=_VALUES[Action], configurable=False, help="what to do"
    )
    json: bool = switch("--json", default=False, read=truth, configurable=False, help="with --list: for machines")
    cache: Path = switch(
        "--cache",
        default=Path(".torch_testing_ext"),
        read=path,
        metavar="FOLDER",
        help="where durations and failures are remembered",
    )
    drop_in: Path | None = switch(
        "--drop-in", default=None, read=path, metavar="PATH", help="a PyTorch checkout, whose tests run on our bases"
    )


def switches() -> dict[str, Switch]:
    return {field.name: field.metadata["switch"] for field in dataclasses.fields(Options)}
