"""All options of a run: the command line, its help, the configuration and the command to run again follow from them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch_testing_ext._machine.device_sharing import RANKS_PER_GPU
from torch_testing_ext._process import devices_setting, system
from torch_testing_ext._process.declarations import AskedOptions, Option
from torch_testing_ext._process.project_folder import root_of_checkout
from torch_testing_ext._process.setting_names import DEFAULT_TIMEOUT
from torch_testing_ext._process.setting_readers import (
    count,
    count_or_zero,
    one_of,
    read_boolean,
    read_path,
    read_seconds,
)
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.runner.model import Policy

from .declaring import Level, OptionGroup, ValueFlag, declared_by, specs_of
from .readers import (
    read_cluster,
    read_environment,
    read_gpus,
    read_pytest_options,
    read_repeat,
    read_shard,
    read_shuffle,
    write_gpus,
)
from .values import (
    Action,
    CountAs,
    Gpus,
    Loader,
    Repeat,
    Rerun,
    ShardSpec,
    Shuffle,
    StatusLevel,
    Verbosity,
    Warm,
)

_selection = OptionGroup("selection", in_command=False)
_resources = OptionGroup("resources")
_cluster = OptionGroup("cluster")
_execution = OptionGroup("execution")
_output = OptionGroup("output", in_command=False)
_other = OptionGroup("other", in_command=False)
# For coverage.py's settings to choose from.
ALL_SOURCES = "*"
T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions(AskedOptions):
    """The options of a run, without those of aspects. `sources` makes the paths absolute."""

    names: tuple[str, ...] = _selection(
        (),
        str,
        "a file, folder or test: test_x.py::Test::test_y",
        "NAME",
        many=True,
        configurable=False,
    )
    # Of run_test.py: as PyTorch's.
    include: tuple[str, ...] = _selection(
        (),
        str,
        "the same as NAME",
        "NAME",
        Level.OF_COMMANDS,
        many=True,
        configurable=False,
        of_pytorch=("-i", "--include"),
    )
    exclude: tuple[str, ...] = _selection(
        (),
        str,
        "tests that never run",
        "NAME",
        Level.SETTING,
        many=True,
        of_pytorch=("-x", "--exclude"),
    )
    # As pytest's: beginnings of test ids.
    deselect: tuple[str, ...] = _selection(
        (), str, "do not run tests whose id begins with ID; may be repeated", "ID", Level.HELP_ALL, many=True
    )
    # Text, or PyTorch's JSON.
    disabled: tuple[Path, ...] = _selection(
        (),
        read_path,
        "skip the tests in a file, with its reasons; may be repeated",
        "FILE",
        Level.HELP_ALL,
        many=True,
    )
    keyword: tuple[str, ...] = _selection(
        (),
        str,
        "run tests whose names match: 'ddp and not slow'",
        "EXPR",
        many=True,
        also=("-k",),
    )
    marks: tuple[str, ...] = _selection(
        (),
        str,
        "run tests whose marks match: 'not slow'",
        "EXPR",
        many=True,
        also=("-m",),
        in_command=True,
    )
    # On a command line: the words after `--`.
    pytest: str = _selection(
        "", read_pytest_options, "options for pytest, as after --", "OPTIONS", Level.SETTING, in_command=True
    )
    # pytest's own, or those of `default_folders`, if there are none.
    tests: tuple[Path, ...] = _selection(
        (),
        read_path,
        "directories to search for tests (default: pytest's testpaths, else the project)",
        "DIR",
        Level.SETTING,
        many=True,
    )
    loader: Loader = _selection(
        Loader.AUTO,
        one_of(Loader),
        "the loader of tests (default: auto, pytest where it is installed; with --drop-in unittest)",
        "auto|pytest|unittest",
        Level.SETTING,
        in_command=True,
    )
    shard: ShardSpec | None = _selection(None, read_shard, "run part I of N, balanced by duration", "I/N")
    rerun: Rerun = _selection(
        Rerun.NOTHING,
        one_of(Rerun),
        values=(
            ValueFlag(("--lf", "--last-failed"), Rerun.LAST_FAILED, "run the tests that failed in their last run"),
        ),
    )
    # A run file.
    rerun_of: Path | None = _selection(
        None,
        read_path,
        "run the tests that did not pass in a run file: failed, not run, or new",
        "FILE",
        Level.HELP_ALL,
        configurable=False,
        also=("--rerun",),
    )
    # A revision of git.
    affected: str | None = _selection(
        None,
        str,
        "run tests whose files changed (since REV)",
        "REV",
        configurable=False,
        alone="HEAD",
    )
    # The tests that the command `why` is asked about.
    why: tuple[str, ...] = _selection(
        (), str, "the tests to explain", "TEST", Level.OF_COMMANDS, many=True, configurable=False
    )
    watch: bool = _selection(False, read_boolean, "run affected tests after each save", configurable=False)

    jobs: int = field(
        default_factory=system.cores,
        metadata=_resources.metadata(
            count, "ranks at once on the CPU (default: all cores)", "N", also=("-j",), in_command=False
        ),
    )
    gpus: Gpus = _resources(
        None,
        read_gpus,
        "use N GPUs, or a list: 0,2 or 0, (default: all)",
        "N|LIST",
        write=write_gpus,
    )
    devices: str = _resources(
        devices_setting.AUTO,
        devices_setting.read_devices,
        "default devices of tests: an accelerator for each rank if there are enough, else the CPU; or always the CPU",
        "auto|cpu",
        Level.SETTING,
    )
    ranks_per_gpu: int = _resources(
        1,
        count,
        "let up to N ranks share a GPU if a test needs more GPUs than there are",
        "N",
        Level.HELP_ALL,
        variable=RANKS_PER_GPU,
    )
    shared_leases: bool = _resources(
        True, read_boolean, "do not use accelerators that your other runs on this machine use", level=Level.SETTING
    )
    memory_check: bool = _resources(
        True,
        read_boolean,
        "wait after a test until the memory of its accelerators is free; stop using an accelerator with a leak",
        level=Level.SETTING,
    )
    lease_folder: Path | None = _resources(
        None,
        read_path,
        "directory of the lock files for sharing accelerators (default: one per user, below /tmp)",
        "DIR",
        Level.SETTING,
        in_command=False,
    )
    warm: Warm = _resources(
        Warm.AUTO,
        one_of(Warm),
        "keep torch imported between runs",
        "auto|on|off",
        alone=Warm.START.value,
        in_command=False,
    )

    cluster: str | None = _cluster(
        None,
        read_cluster,
        "use a cluster: slurm, or Ray at auto, HOST:PORT or ray://HOST:PORT",
        "ADDRESS",
        Level.HELP_ALL,
    )
    cluster_nodes: int | None = _cluster(
        None, count, "use N nodes (default: all free ones)", "N", Level.HELP_ALL, needs="cluster"
    )
    cluster_gpus_per_node: int | None = _cluster(
        None, count, "use N accelerators of each node (default: all free ones)", "N", Level.SETTING, needs="cluster"
    )
    cluster_fake_gpus: bool = _cluster(
        False,
        read_boolean,
        "treat the GPUs that Ray reports as fake, to try a cluster without GPUs",
        level=Level.SETTING,
        needs="cluster",
    )
    cluster_timeout: float = _cluster(
        300.0,
        read_seconds,
        "wait this long for nodes that are in use",
        "SECONDS",
        Level.SETTING,
        needs="cluster",
        in_command=False,
    )
    cluster_root: Path | None = _cluster(
        None,
        read_path,
        "the project's path on each node, on a shared file system (default: send the project to the nodes)",
        "PATH",
        Level.SETTING,
        needs="cluster",
    )
    cluster_setup: str | None = _cluster(
        None, str, "run this shell command in the project, once on each node", "COMMAND", Level.SETTING, needs="cluster"
    )
    cluster_fetch: tuple[str, ...] = _cluster(
        (),
        str,
        "bring back these files when tests create or change them on the nodes",
        "PATTERN",
        Level.SETTING,
        many=True,
        needs="cluster",
        in_command=False,
    )
    cluster_env: str = _cluster(
        "",
        read_environment,
        "send only these environment variables to the nodes (A,B_*), or all but these (-A,-B_*) (default: all but "
        "those that belong to this machine or look like secrets)",
        "NAME,...",
        Level.SETTING,
        needs="cluster",
    )
    cluster_only: tuple[str, ...] = _cluster(
        (),
        str,
        "use only nodes with this name, address or Ray label",
        "NAME|LABEL=VALUE",
        Level.SETTING,
        many=True,
        needs="cluster",
    )
    cluster_not: tuple[str, ...] = _cluster(
        (),
        str,
        "use no node with this name, address or Ray label",
        "NAME|LABEL=VALUE",
        Level.SETTING,
        many=True,
        needs="cluster",
    )

    maxfail: int | None = _execution(
        None,
        count,
        "stop after N failures",
        "N",
        values=(ValueFlag(("-x", "--exitfirst"), 1, "stop after the first failure"),),
        in_command=False,
    )
    timeout: float = _execution(
        300.0,
        read_seconds,
        "time limit of a test",
        "SECONDS",
        variable=DEFAULT_TIMEOUT,
    )
    slow_after: float = _execution(
        30.0,
        read_seconds,
        "report tests still running after this time",
        "SECONDS",
        Level.SETTING,
        in_command=False,
    )
    retries: int = _execution(
        0, count_or_zero, "retry a failed test up to N times", "N", also=("--reruns",), in_command=False
    )
    flaky: CountAs = _execution(
        CountAs.PASS,
        one_of(CountAs),
        "count a test that passes on a retry as passed or failed",
        "pass|fail",
        Level.HELP_ALL,
        in_command=False,
    )
    leaked: CountAs = _execution(
        CountAs.PASS,
        one_of(CountAs),
        "count a test that passes but leaves processes running as passed or failed",
        "pass|fail",
        Level.SETTING,
    )
    repeat: int | Repeat | None = _execution(
        None, read_repeat, "run tests N times, or until one fails", "N|until-failure"
    )
    repeat_new: int = _execution(
        0,
        count_or_zero,
        "run new tests N times, without retries",
        "N",
        Level.HELP_ALL,
        in_command=False,
    )
    shuffle: int | Shuffle | None = _execution(
        None, read_shuffle, "run tests in random order", "SEED", alone=Shuffle.RANDOM.value, in_command=False
    )

    verbosity: Verbosity = _output(
        Verbosity.NORMAL,
        one_of(Verbosity),
        values=(
            ValueFlag(("-v", "--verbose"), Verbosity.VERBOSE, "also print where each test ran"),
            ValueFlag(("-q", "--quiet"), Verbosity.QUIET, "print only failures and the summary"),
        ),
    )
    status_level: StatusLevel = _output(
        StatusLevel.ALL,
        one_of(StatusLevel),
        "print a line for tests with this result or a worse one: none, fail, retry, slow, leak, pass, skip, all",
        "LEVEL",
        Level.SETTING,
    )
    durations: int | None = _output(None, count_or_zero, "list the N slowest tests, 0 for all", "N", Level.HELP_ALL)

    junitxml: Path | None = _output(None, read_path, "write a JUnit XML report", "FILE", also=("--junit-xml",))
    html: Path | None = _output(None, read_path, "write an HTML report", "FILE")
    results: Path | None = _output(None, read_path, "write all results as JSON", "FILE", Level.HELP_ALL)
    about: bool = _output(
        False, read_boolean, "print what a report of a bug needs instead", level=Level.OF_COMMANDS, configurable=False
    )
    # An option of the command `show`.
    json: bool = _output(
        False,
        read_boolean,
        "print each failure as one line of JSON, at most 4 kB",
        level=Level.OF_COMMANDS,
        configurable=False,
    )
    run_file: Path | None = _output(None, read_path, "write the run as one file", "FILE", Level.HELP_ALL)
    run_file_logs: bool = _output(
        False, read_boolean, "keep the logs of passed tests in --run-file, too", level=Level.SETTING
    )
    journal: Path | None = _output(
        None,
        read_path,
        "file for the results, written as they come in (default: runs/TIME-PID/journal.jsonl in --cache)",
        "FILE",
        Level.SETTING,
    )

    action: Action = _other(
        Action.RUN,
        one_of(Action),
        values=(
            ValueFlag(("--list", "--collect-only", "--co"), Action.LIST, "list the tests, and run nothing"),
            ValueFlag(("--list=json",), Action.LIST_AS_JSON, "list the tests as JSON"),
            ValueFlag(
                ("--dry-run",),
                Action.DRY_RUN,
                "print the schedule, and run nothing",
            ),
        ),
        configurable=False,
    )
    coverage: str | None = _other(
        None,
        str,
        "measure the coverage of all processes, or only of a package or folder",
        "SOURCE",
        Level.HELP_ALL,
        alone=ALL_SOURCES,
        also=("--cov",),
        configurable=False,
    )
    allow_all_skipped: bool = _other(
        False,
        read_boolean,
        "exit with 0 instead of 6 if all tests were skipped for lack of devices",
        level=Level.SETTING,
    )
    cache: Path = _other(
        Path(".torch_testing_ext"),
        read_path,
        "directory for results and durations",
        "DIR",
        Level.HELP_ALL,
        in_command=True,
    )
    drop_in: tuple[Path, ...] = _other(
        (),
        read_path,
        "run PyTorch's own tests: a checkout, folder or file; may be repeated",
        "PATH",
        Level.HELP_ALL,
        many=True,
        in_command=True,
    )

    # The fields of the options that the command line sets to another value than the sources before it.
    overriding: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def drop_in_root(self) -> Path | None:
        """The folder to which the names of dropped-in tests are relative; None without any."""
        roots = {root_of_checkout(path) for path in self.drop_in}
        return Path(os.path.commonpath(roots)) if roots else None

    def value(self, option: Option[T]) -> T:
        """The value of an option that an aspect declares."""
        value: T = getattr(self, option.field, option.default)
        return value

    @property
    def takes_terminal(self) -> bool:
        """Whether tests have the user's terminal."""
        return any(aspect.takes_terminal(self) for aspect in ASPECTS)

    @property
    def by_pytest(self) -> bool:
        """Whether pytest loads the test files; `read_options` has seen to it that it is installed."""
        if self.loader is Loader.AUTO:
            return not self.drop_in and importlib.util.find_spec("pytest") is not None
        return self.loader is Loader.PYTEST

    @property
    def endless(self) -> bool:
        """Whether the run repeats until a test fails."""
        return self.repeat is Repeat.UNTIL_FAILURE

    @property
    def repetitions(self) -> int:
        """The number of repetitions that are planned when the run begins."""
        decided = (aspect.repetitions(self) for aspect in ASPECTS)
        by_aspect = next((number for number in decided if number is not None), None)
        if by_aspect is not None:
            return by_aspect
        return self.repeat if isinstance(self.repeat, int) else 1

    @property
    def policy(self) -> Policy:
        return Policy(fail_flaky=self.flaky is CountAs.FAIL, fail_leaked=self.leaked is CountAs.FAIL)


def _options_of_aspects() -> Iterator[Option[Any]]:
    for aspect in ASPECTS:
        yield from (option for option in aspect.options if option.in_runner)


if TYPE_CHECKING:

    class Options(RunOptions):
        """All options of a run."""

        def __init__(self, **values: Any): ...

else:
    Options = make_dataclass(
        "Options",
        declared_by(_options_of_aspects()),
        bases=(RunOptions,),
        namespace={"__module__": __name__, "__doc__": "All options of a run."},
        frozen=True,
    )

# All options by field.
OPTION_TABLE = specs_of(Options, RunOptions, last_groups="output")
