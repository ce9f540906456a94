"""Functions and scripts in ranks."""

from __future__ import annotations

import atexit
import functools
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.records.raw_records import RawRecord, unpack_record
from torch_testing_ext._machine import accelerators
from torch_testing_ext._process import ends, messages, system, user_commands
from torch_testing_ext._process.launcher_variables import without_launch
from torch_testing_ext._process.logs import cut_middle, text_of
from torch_testing_ext._process.project_settings import AUTO, default_devices
from torch_testing_ext._process.source_files import source_file
from torch_testing_ext._process.words import list_of
from torch_testing_ext._testing.bases import launched_ranks, rank_accounts, ranked_test_case
from torch_testing_ext._testing.bases.invocation import CommandEnd, run_limited
from torch_testing_ext._testing.bases.rank_accounts import account_for_error
from torch_testing_ext._testing.bases.rank_life import run_rank
from torch_testing_ext._testing.bases.rank_verdicts import RankError, raise_verdict
from torch_testing_ext._testing.bases.ranked_test_case import checked_world_size
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import checked_devices, devices_for, kinds_on, may_differ
from torch_testing_ext.launch import session
from torch_testing_ext.launch.aspects import rank_warnings
from torch_testing_ext.launch.aspects.output import show_to_user
from torch_testing_ext.launch.attempts import (
    DeviceNeed,
    Host,
    HostKind,
    ProcessHost,
    RankAttempt,
    RanksEnd,
    TestPlan,
)
from torch_testing_ext.launch.in_rank import Sanitize, log_of
from torch_testing_ext.launch.probes import Logs, records_of
from torch_testing_ext.launch.rank_watch import RankEvidence, with_collectives

from .invocation import case_of

# --------------------------------------------------------------------------------------------------------------------
# `run_script`: a script that is meant for torchrun, in ranks of ours, or under torchrun itself.

__unittest = True
# Does the same in pytest.
__tracebackhide__ = True

LAUNCHERS = (None, "torchrun")
LONGEST_OUTPUT = 20_000
_END_TIMEOUT = 5.0


@dataclass(frozen=True)
class ScriptRun:
    """The output of a script that has ended in every rank."""

    # Stdout and stderr of each rank; of torchrun, one text for all.
    outputs: tuple[str, ...]


def run_script(
    path: str | os.PathLike[str],
    *args: object,
    world_size: int = 4,
    devices: int | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    launcher: str | None = None,
) -> ScriptRun:
    """Run a script in ranks, as torchrun does, and fail if it fails in a rank.

        run = run_script("train.py", "--steps", 2, world_size=4)
        assert "loss" in run.outputs[0]

    Each rank runs `python path *args` with torchrun's variables, and those of `env`, in a fork of a new interpreter
    that has imported torch. `launcher="torchrun"` starts the ranks with torchrun itself, which takes seconds, and
    compares their collectives only at the end. `timeout` and `devices` are as in `spawn`.
    """
    size = checked_world_size(world_size, "world_size")
    launched_ranks.refuse("run_script")
    script = Path(path).absolute()
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher is {launcher!r}; it must be one of {LAUNCHERS}")
    words = [str(arg) for arg in args]
    kind = _ScriptRanks if launcher is None else _TorchrunRanks
    host = kind(script, words, env or {})
    plan = TestPlan(
        case_of(script.name, str(script)),
        size,
        timeout or ranked_test_case.TIMEOUT_DEFAULT,
        devices=need_of_devices(devices, size, name=script.name),
    )
    raise_verdict(session.run(host, plan))
    return ScriptRun(host.outputs)


class _ShownRanks(ProcessHost):
    """Ranks whose output is shown if they pass."""

    def __init__(self) -> None:
        # What each rank has printed.
        self.outputs: tuple[str, ...] = ()

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        # A rank that is debugged has the terminal, and no file.
        ranks = range(attempt.plan.world_size)
        self.outputs = tuple(text_of(attempt.directory / f"rank{rank}.log") for rank in ranks)
        if end.verdict.outcome is launch.Outcome.PASSED:
            for rank, output in enumerate(self.outputs):
                for line in output.splitlines():
                    print(f"[rank{rank}] {line}")
        return end


class _ScriptRanks(_ShownRanks):
    """A script in ranks of ours."""

    kind = HostKind.SCRIPT

    def __init__(self, script: Path, words: Sequence[str], env: Mapping[str, str]):
        super().__init__()
        self._script = script
        self._words = words
        self._env = env

    def start(self, attempt: RankAttempt) -> None:
        job = attempt.job(_run_in_script, arguments={"script": str(self._script)})
        environ = {**job.context.environ, **self._env}
        argv = (str(self._script), *self._words)
        context = launch.ProcessContext(environ, user_commands.working_folder(), _search_path(self._script), argv)
        self.run = launch.launch_fresh(replace(job, context=context))


def _search_path(script: Path) -> tuple[str, ...]:
    """The sys.path of a script: Python's, and what pytest has inserted in this process."""
    usual = _usual_path(sys.executable, os.environ.get("PYTHONPATH", ""))
    inserted = [entry for entry in sys.path if entry not in usual]
    return (str(script.parent), *usual, *inserted)


@functools.cache
def _usual_path(executable: str, python_path: str) -> tuple[str, ...]:
    """The sys.path of a new interpreter, without the folder of its script."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    result = subprocess.run([executable, "-c", code], capture_output=True, check=True)
    # What a .pth file or a sitecustomize prints comes before it.
    *_, path = result.stdout.splitlines()
    return tuple(json.loads(path))


def _run_in_script(context: launch.RankContext, script: str) -> None:
    def body() -> None:
        try:
            _run_as_main(script)
            _end_as_an_interpreter()
        except SystemExit:
            raise
        except BaseException as error:
            # A script cannot skip.
            account_for_error(context.account, error)

    run_rank(context, body)


def _run_as_main(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def _end_as_an_interpreter() -> None:
    """Do what Python does when a script is over, since a rank ends by os._exit."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


# -- under torchrun


class _TorchrunRanks(Host):
    """A script in ranks that torchrun starts. Their collectives are compared once torchrun has ended."""

    kind = HostKind.TORCHRUN

    def __init__(self, script: Path, words: Sequence[str], env: Mapping[str, str]):
        self._script = script
        self._words = words
        self._env = env
        # One text of all ranks.
        self.outputs: tuple[str, ...] = ()

    def start(self, attempt: RankAttempt) -> None:
        attempt.equip()

    def judge(self, attempt: RankAttempt) -> RanksEnd:
        """Run torchrun, and judge what its ranks have left. Raises an error with the output if it fails."""
        script, size, directory = self._script, attempt.plan.world_size, attempt.directory
        began = launch.now()
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        wrapper = (str(Path(__file__).with_name("torchrun_rank.py")), str(directory))
        # By default, torchrun leaves a folder for logs behind.
        logs = f"--log-dir={directory / 'logs'}"
        of_rank = (*wrapper, messages.to_json(attempt.sanitize), str(script), *self._words)
        environ = {**without_launch({**os.environ, **attempt.environ}), **system.for_gloo(), **self._env}
        limit = attempt.plan.timeout or ranked_test_case.TIMEOUT_DEFAULT
        output, end = _output_of([sys.executable, *launcher, logs, *of_rank], environ, limit, directory / "output")
        left = _Left(directory, size, attempt.sanitize)
        if end.code != 0:
            finding = left.mismatch()
            why = f"\n\n{finding.text}" if finding is not None else ""
            rerun = user_commands.command(*launcher, str(script), *self._words)
            raise RankError(
                f"torchrun {end.how}: {script.name} in {size} ranks\n\n{cut_middle(output, LONGEST_OUTPUT)}{why}\n\n"
                f"To run it alone:\n  {rerun}"
            )
        self.outputs = (output,)
        print(output, end="")
        return left.judge(attempt.plan.case, launch.now() - began)


def _output_of(command: list[str], environ: Mapping[str, str], limit: float, log: Path) -> tuple[str, CommandEnd]:
    """Run torchrun; return its output, with that of its ranks, and how it ended."""
    with log.open("ab") as output:
        end = run_limited(command, limit, environ, output, _end_torchrun)
    return log.read_text(encoding="utf-8", errors="replace"), end


def _end_torchrun(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its workers; then what is left of it and of them, which have sessions of their own.

    If torchrun has ended by itself, it has done that.
    """
    if process.returncode is not None:
        return
    workers = system.descendants(process.pid)
    ends.end(process, after_sigterm=_END_TIMEOUT)
    started_since = [pid for worker in workers for pid in system.descendants(worker)]
    for pid in (*workers, *started_since):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Left:
    """The files that ranks have left in the folder. A rank that did not come to Python's exit has left nothing."""

    def __init__(self, directory: Path, size: int, sanitize: Sanitize):
        self._ranks = range(size)
        self._note = sanitize.note
        self._logs = Logs([log_of(directory, rank) for rank in self._ranks], sanitize)
        self._unknown: list[int] = []
        self._left: list[RawRecord | None] = []
        for rank in self._ranks:
            files = list(directory.glob(f"rank{rank}.*.left"))
            # Of several processes with the number of a rank, it is not known which is the rank.
            if len(files) == 1:
                self._left.append(unpack_record(files[0].read_bytes()))
            else:
                self._unknown.append(rank)
                self._left.append(None)

    def mismatch(self) -> Finding | None:
        records = [raw.record(rank) for rank, raw in enumerate(self._left) if raw is not None]
        return first_mismatch(list(records_of(self._logs.read()).values()) or records)

    def judge(self, case: launch.Case, seconds: float) -> RanksEnd:
        """Judge ranks that have all passed."""
        if self._unknown:
            show_to_user(
                f"{case.name}: the collectives of {list_of(self._unknown)} were not compared with those of others: "
                "Python did not end there by itself"
            )
        reports = [launch.RankReport(rank, launch.RankEnding.PASSED, seconds, launch.now()) for rank in self._ranks]
        reports = with_collectives(reports, self._logs, self._left)
        evidence = RankEvidence(tuple(reports), note=self._note)
        return RanksEnd(evidence.reports, evidence.verdict(case))


# --------------------------------------------------------------------------------------------------------------------
# `spawn`: a function in ranks, as torch.multiprocessing.spawn does it, with our start, verdict and clean-up.

# Does the same in pytest.


def spawn(
    function: Callable[..., object],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    backend: str | None = None,
    devices: int | str | None = None,
) -> None:
    """Call `function(rank, *args)` in each of `world_size` fresh ranks, and fail if it fails in a rank.

        def train(rank, steps): ...

        spawn(train, 4, 10, backend="gloo")

    With `backend`, the ranks have a process group before the call. `timeout` is in seconds (default: 300).
    `devices="auto"` gives each rank an accelerator if there are enough, else the CPU; 0 is the CPU; with a number, the
    test skips on a machine with fewer. The default is the project's setting `devices`, or what `backend` needs.

    Ranks are forked from this process. If that is not safe, they are new interpreters: then the function must be
    importable, and the arguments are pickled.
    """
    size = checked_world_size(world_size, "world_size")
    launched_ranks.refuse("spawn")
    need = need_of_devices(devices, size, backend, _name_of(function))
    run_spawned(function, size, args, timeout, backend, need)


def _name_of(function: Callable[..., object]) -> str:
    return f"spawn({getattr(function, '__qualname__', function)!s})"


def need_of_devices(
    devices: int | str | None, world_size: int, backend: str | None = None, name: str = ""
) -> DeviceNeed:
    """The accelerators that ranks are to lease; all others are hidden from them. Raises a skip if there are too few.

    Where nothing says what the ranks use, they see all, and none is leased.
    """
    default = default_devices(Path(user_commands.working_folder() or os.sep))
    devices = devices_for(checked_devices(devices), world_size, backend, default)
    if devices == AUTO:
        devices = world_size if accelerators.most_ranks() >= world_size else 0
    skip = needs.devices(devices).unmet() if isinstance(devices, int) and devices else None
    if skip is not None:
        raise needs.Skipped(skip)
    count = devices if isinstance(devices, int) else 0
    return DeviceNeed(count, are_hidden=devices is not None and not count, owner=f"pid {os.getpid()}: {name}")


def run_spawned(
    function: Callable[..., object],
    size: int,
    args: tuple[Any, ...],
    timeout: float | None = None,
    backend: str | None = None,
    need: DeviceNeed | None = None,
    case: launch.Case | None = None,
    targets: Sequence[Any] = (),
) -> None:
    """Do what `spawn` does, with these devices, under the name of `case`.

    `targets`: whose decorators hold for the ranks, in place of the function's.
    """
    launched_ranks.refuse("spawn")
    targets = targets or (function,)
    plan = TestPlan(
        case or case_of(_name_of(function), source_file(function)),
        size,
        timeout or ranked_test_case.TIMEOUT_DEFAULT,
        launch.Expected(may_differ=may_differ(*targets)),
        kinds_on(*targets),
        devices=need or DeviceNeed(),
    )
    raise_verdict(session.run(_SpawnedRanks(function, args, backend), plan))


class _SpawnedRanks(_ShownRanks):
    """A function in ranks that inherit the call; only new interpreters are sent it, without closures."""

    kind = HostKind.INHERITING

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], backend: str | None):
        super().__init__()
        self._function = function
        self._args = args
        self._backend = backend

    def start(self, attempt: RankAttempt) -> None:
        try:
            self.run = launch.launch_from_here(attempt.job(_run), (self._function, self._args, self._backend))
        except launch.CannotStart as error:
            if error.is_refused:
                raise
            self.run = self._start_new_interpreters(attempt, error)

    def _start_new_interpreters(self, attempt: RankAttempt, why: Exception) -> launch.Run:
        try:
            named = launch.Named.of(self._function)
        except (AttributeError, TypeError):
            raise RankError(f"{why}\n\nNew interpreters could run only a function that has a name.") from None
        try:
            # To pickle them may need the function's module.
            sent = pickle.dumps((self._args, self._backend))
            return launch.launch_fresh(attempt.job(_run, arguments={"call": (named, sent)}))
        except (pickle.PicklingError, TypeError, AttributeError, ImportError) as error:
            raise RankError(f"{why}\n\nNew interpreters cannot be sent the arguments: {error}") from None


def _run(context: launch.RankContext, call: tuple[launch.Named, bytes] | None = None) -> None:
    """The body of a rank."""
    if call is None:
        function, args, backend = context.inherited
    else:
        named, sent = call
        function = named.resolve()
        args, backend = pickle.loads(sent)

    def body() -> None:
        with rank_warnings.recorded_warnings(context.account):
            if backend is not None:
                dist.init_process_group(backend)
            rank_accounts.refuse_what_ran_nothing(function(context.rank, *args))

    run_rank(context, body)
