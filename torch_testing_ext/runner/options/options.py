"""What a user may ask for, as all other rooms read it."""

from __future__ import annotations

import enum
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ..model import Policy


class UsageError(ValueError):
    """What a user wrote is not understood; nothing is run."""


class CannotRun(RuntimeError):
    """Tests cannot be run at all; the message says why."""


class Rerun(enum.Enum):
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


@dataclass(frozen=True)
class ShardSpec:
    index: int  # from 1
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


Gpus = int | tuple[str, ...] | None  # so many, just these, or all there are


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Options:
    """Paths are absolute once config.py has read them. How each is asked for is said in switches.py."""

    names: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    tests: tuple[Path, ...] = (Path("test/distributed"),)
    shard: ShardSpec | None = None
    again: Rerun = Rerun.NOTHING

    jobs: int = field(default_factory=usable_cores)
    gpus: Gpus = None
    fake_gpus: int | None = None

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

    verbosity: Verbosity = Verbosity.NORMAL
    stream: bool = False
    durations: int = 5
    junit: Path | None = None
    report: Path | None = None
    trace: Path | None = None
    results: Path | None = None
    allow_all_skipped: bool = False

    action: Action = Action.RUN
    json: bool = False
    cache: Path = Path(".torch_testing_ext")
    drop_in: Path | None = None

    @property
    def command(self) -> str:
        """What to put before a test's name to run it again."""
        return "python run_test.py" + (f" --drop-in {shlex.quote(str(self.drop_in))}" if self.drop_in else "")

    @property
    def endless(self) -> bool:
        return self.until_failure and self.repeat is None

    @property
    def policy(self) -> Policy:
        return Policy(fail_flaky=self.flaky is CountAs.FAIL, fail_leaked=self.leaked is CountAs.FAIL)
