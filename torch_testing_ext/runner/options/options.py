"""The options of a run, as the rest of the runner reads them."""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch_testing_ext._process import shell, system, user_commands, user_terminal
from torch_testing_ext._process.kept_accounts import CACHE
from torch_testing_ext._process.user_terminal import UserTerminal

from ..model import Policy

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
    """Whether a warm server forks the zygote."""

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
    """All options of a run. config.py makes the paths absolute; table.py has the flags and help texts."""

    names: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    # config.py finds the project's.
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
        words = [user_commands.runner()]
        if not self.drop_in:
            words += self._of_cache
        words += [f"-m {shell.quote(expression)}" for expression in self.marks]
        if self.cluster is not None:
            words.append(f"--cluster {shell.quote(self.cluster)}")
        if self.fake_gpus is not None:
            words.append(f"--fake-gpus {self.fake_gpus}")
        if self.ranks_per_gpu > 1:
            words.append(f"--ranks-per-gpu {self.ranks_per_gpu}")
        root = self.drop_in_root
        places = (root,) if root is not None and is_checkout(root) else self.drop_in
        words += [f"--drop-in {shell.quote(str(place))}" for place in places]
        if self.sanitize is not None:
            words.append(f"--sanitize={self.sanitize}")
        if self.sanitize_order is OrderHazard.FAIL:
            words.append("--sanitize-order=fail")
        return " ".join(words)

    @property
    def show_command(self) -> str:
        """The command that shows all about the failure of a test of this run, whose name is appended to it."""
        words = [user_commands.runner(), user_commands.SHOW]
        if self.journal is None:
            words += self._of_cache
        else:
            words.append(f"--journal {shell.quote(os.path.relpath(self.journal))}")
        return " ".join(words)

    @property
    def _of_cache(self) -> list[str]:
        cache = os.path.relpath(self.cache)
        if cache == CACHE:
            return []
        return [f"--cache {shell.quote(cache)}"]

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
        terminal = UserTerminal(why_not=f"run it with a debugger: {self.command} --pdb {user_terminal.TEST}")
        if self.pdb:
            terminal = replace(UserTerminal.here(), stop_in=self.rank if self.debug else None)
        return {user_terminal.SETTING: terminal.written(), "TORCH_TESTING_EXT_DEBUG_RANK": ""}

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
