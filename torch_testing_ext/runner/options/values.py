"""The values of options, and the errors of those who choose them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class UsageError(ValueError):
    """A mistake in the command line or the configuration; nothing runs."""


class CannotRun(RuntimeError):
    """No test can run; the message says why."""


class Warm(enum.Enum):
    """The use of a warm server, which forks the preloaded server."""

    # If one runs.
    AUTO = "auto"
    START = "on"
    NEVER = "off"


class Rerun(enum.Enum):
    """The use of the failures of earlier runs."""

    NOTHING = "nothing"
    # Run only these tests.
    LAST_FAILED = "last-failed"


class Loader(enum.Enum):
    """The program that finds tests in files and runs them."""

    # pytest where it is installed; unittest elsewhere, and for PyTorch's own tests.
    AUTO = "auto"
    PYTEST = "pytest"
    UNITTEST = "unittest"


class Action(enum.Enum):
    """The work of run_test.py on the selected tests."""

    RUN = "run"
    LIST = "list"
    LIST_AS_JSON = "list=json"
    DRY_RUN = "dry-run"

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


class Repeat(enum.Enum):
    """A number of repetitions that is not known before the run."""

    UNTIL_FAILURE = "until-failure"


class Shuffle(enum.Enum):
    """A random order without a seed of the user."""

    RANDOM = "random"


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
