"""The options of a run, as the rest of the runner reads them."""

from __future__ import annotations

import difflib
import enum
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch_testing_ext._process import shell

from ..model import Policy

NEAR = 0.5  # similarity as difflib measures it; 1 means equal


class UsageError(ValueError):
    """A mistake in the command line or the configuration; nothing runs."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """` Did you mean: a, b?`; the nearest known names if none is similar."""
    names = sorted(set(known))
    if near := difflib.get_close_matches(name, names, n=most, cutoff=NEAR):
        return f" Did you mean: {', '.join(near)}?"
    nearest_names = difflib.get_close_matches(name, names, n=most, cutoff=0.0)
    return f" Nearest known: {', '.join(nearest_names)}." if nearest_names else ""


class CannotRun(RuntimeError):
    """No test can run; the message says why."""


class Rerun(enum.Enum):
    """The use of the failures of earlier runs."""

    NOTHING = "nothing"
    LAST_FAILED = "last-failed"  # run only these tests
    FAILED_FIRST = "failed-first"  # run these tests first


class Action(enum.Enum):
    """The work of run_test.py on the selected tests."""

    RUN = "run"
    LIST = "list"
    DRY_RUN = "dry-run"
    SHOW_CONFIG = "show-config"


class Verbosity(enum.Enum):
    """The detail of the console report."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


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

    index: int  # starts at 1
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


ALL_CPUS = 1 << 16  # the number of jobs on a node of a cluster, unless --jobs limits it
Gpus = int | tuple[str, ...] | None  # a number of devices, their names, or None for all


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Options:
    """All options of a run. config.py makes the paths absolute; table.py has the flags and help texts."""

    names: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    tests: tuple[Path, ...] = (Path("test/distributed"),)
    shard: ShardSpec | None = None
    rerun: Rerun = Rerun.NOTHING

    jobs: int = field(default_factory=usable_cores)
    gpus: Gpus = None
    fake_gpus: int | None = None
    ranks_per_gpu: int = 1
    shared_leases: bool = True
    lease_folder: Path | None = None

    cluster: str | None = None
    cluster_nodes: int | None = None
    cluster_gpus_per_node: int | None = None
    cluster_fake_gpus: bool = False
    cluster_timeout: float = 300.0
    cluster_root: Path | None = None
    cluster_setup: str | None = None

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

    verbosity: Verbosity = Verbosity.NORMAL
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
        root = self.drop_in_root
        places = (root,) if root is not None and is_checkout(root) else self.drop_in
        words = [program()]
        words += [f"--cluster {shell.quote(self.cluster)}"] if self.cluster is not None else []
        words += [f"--drop-in {shell.quote(str(place))}" for place in places]
        words += [f"--sanitize={self.sanitize}"] if self.sanitize is not None else []
        words += ["--sanitize-order=fail"] if self.sanitize_order is OrderHazard.FAIL else []
        return " ".join(words)

    def command_of(self, repetition: int, command: str | None = None) -> str:
        """The command, or another one, for a test of this repetition: with the delays that it has had."""
        shaken = [] if self.shake_seed is None else [f"--shake-seed {self.shake_seed + repetition}"]
        return " ".join([self.command if command is None else command, *shaken])

    def environment_of_sanitizer(self, repetition: int) -> dict[str, str]:
        """The settings of the ranks that follow from the options of the sanitizer."""
        found = {} if self.sanitize is None else {"TORCH_TESTING_EXT_SANITIZE": self.sanitize}
        if self.sanitize_order is OrderHazard.FAIL:
            found["TORCH_TESTING_EXT_SANITIZE_ORDER"] = "fail"
        if self.shake_seed is not None:
            found["TORCH_TESTING_EXT_SHAKE"] = str(self.shake_seed + repetition)
        return found

    @property
    def endless(self) -> bool:
        """Whether the run repeats until a test fails, without a limit."""
        return self.until_failure and self.repeat is None

    @property
    def policy(self) -> Policy:
        return Policy(fail_flaky=self.flaky is CountAs.FAIL, fail_leaked=self.leaked is CountAs.FAIL)


def program() -> str:
    """The command that the user gave: a script of the project, or this package as a module."""
    as_module = sys.argv[0] == str(Path(__file__).parents[1] / "__main__.py")
    return "python -m torch_testing_ext.runner" if as_module else "python run_test.py"


def is_checkout(folder: Path) -> bool:
    """Is this a checkout of PyTorch, or a project that keeps its tests in the same folder?"""
    return (folder / "test").is_dir()


def _root_of(path: Path) -> Path:
    """The checkout that contains a test file or folder; if there is none, the folder or that of the file."""
    if is_checkout(path):
        return path
    inside = next((folder.parent for folder in path.parents if folder.name == "test"), None)
    return inside or (path if path.is_dir() else path.parent)
