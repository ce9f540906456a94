"""`run_script`: a script that is meant for torchrun, in ranks of ours, or under torchrun itself."""

import atexit
import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch_testing_ext import launch
from torch_testing_ext._collectives.findings import Finding, first_mismatch
from torch_testing_ext._collectives.raw import RawRecord, unpack
from torch_testing_ext._process import messages, reaping, system, user_commands
from torch_testing_ext._process.launcher_variables import without_launch
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.run_limited import run_limited
from torch_testing_ext._process.words import list_of
from torch_testing_ext._sanitizer.kinds import SanitizeKind
from torch_testing_ext.launch.job import Sanitize, log_of
from torch_testing_ext.launch.rank_evidence import RankEvidence, with_collectives
from torch_testing_ext.launch.sanitizer_logs import Logs, records_of

from . import launched_ranks, ranked
from .accounting import account_for_error
from .invocation import case_of
from .jobs import run_to_end
from .rank_checks import sanitize_with
from .rank_life import run_rank
from .ranked import checked_world_size
from .verdicts import RankError, raise_verdict, say, say_once

__unittest = True
# Does the same in pytest.
__tracebackhide__ = True

LAUNCHERS = (None, "torchrun")
LONGEST_OUTPUT = 20_000
_END_TIMEOUT = 5.0


@dataclass(frozen=True)
class ScriptRun:
    """A script that has run to its end in every rank."""

    # Stdout and stderr of each rank; of torchrun, one text for all.
    outputs: tuple[str, ...]


def run_script(
    path: str | os.PathLike[str],
    *args: object,
    ranks: int = 4,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    launcher: str | None = None,
) -> ScriptRun:
    """Run `python path *args` in each of `ranks` ranks, with torchrun's variables; raise their verdict unless all end.

    Ranks are forked off a new interpreter that has imported torch and has nothing else of this process. `env` is added
    to the environment. `launcher="torchrun"` has torchrun start the ranks instead, which takes seconds; their
    collectives are compared at the end only.
    """
    size = checked_world_size(ranks, "ranks")
    launched_ranks.refuse("run_script")
    script = Path(path).absolute()
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher is {launcher!r}; it must be one of {LAUNCHERS}")
    words = [str(arg) for arg in args]
    if launcher is not None:
        return ScriptRun((_under_torchrun(script, words, size, env or {}, timeout),))
    case = case_of(script.name, str(script))

    def start(make_job: Callable[..., launch.Job]) -> launch.Run:
        job = make_job(_run, arguments={"script": str(script)})
        environ = {**job.context.environ, **(env or {})}
        context = launch.ProcessContext(environ, os.getcwd(), _search_path(script), (str(script), *words))
        return launch.launch_fresh(replace(job, context=context))

    return ScriptRun(run_to_end(case, size, timeout, start, launch.Expected()))


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


def _run(context: launch.RankContext, script: str) -> None:
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


def _under_torchrun(script: Path, words: list[str], size: int, env: Mapping[str, str], timeout: float | None) -> str:
    """Run a script under torchrun; return its output. Raises the verdict on its ranks, unless all pass.

    The collectives that these have issued are compared once torchrun has ended.
    """
    sanitize = sanitize_with(())
    if SanitizeKind.HASH in sanitize.kinds:
        say_once("ranks that torchrun starts are not checked for: hash")
        sanitize = replace(sanitize, kinds=sanitize.kinds - {SanitizeKind.HASH})
    directory = launch.new_directory(script.name)
    began = launch.now()
    try:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        wrapper = (str(Path(__file__).with_name("torchrun_rank.py")), str(directory), messages.to_json(sanitize))
        command = [sys.executable, *launcher, *wrapper, str(script), *words]
        output, how = _output_of(command, env, timeout or ranked.TIMEOUT_DEFAULT, directory / "output")
        left = _Left(directory, size, sanitize)
        if how != reaping.describe_exit(0):
            finding = left.mismatch()
            why = f"\n\n{finding.text}" if finding is not None else ""
            rerun = user_commands.command(*launcher, str(script), *words)
            raise RankError(
                f"torchrun {how}: {script.name} in {size} ranks\n\n{cut_middle(output, LONGEST_OUTPUT)}{why}\n\n"
                f"To run it alone:\n  {rerun}"
            )
        print(output, end="")
        verdict = left.verdict(script, launch.now() - began)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    raise_verdict(verdict)
    return output


def _output_of(command: list[str], env: Mapping[str, str], limit: float, log: Path) -> tuple[str, str]:
    """Run torchrun; return its output, with that of its ranks, and how it ended."""
    environ = {**without_launch(os.environ), **system.for_gloo(), **env}
    with log.open("ab") as output:
        ended = run_limited(command, limit, environ, output, _end_torchrun)
    return log.read_text(errors="replace"), ended.how


def _end_torchrun(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its workers; then what is left of it and of them, which have sessions of their own.

    If torchrun has ended by itself, it has done that.
    """
    if process.returncode is not None:
        return
    workers = system.descendants(process.pid)
    reaping.end(process, after_sigterm=_END_TIMEOUT)
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
                self._left.append(unpack(files[0].read_bytes()))
            else:
                self._unknown.append(rank)
                self._left.append(None)

    def mismatch(self) -> Finding | None:
        records = [raw.record(rank) for rank, raw in enumerate(self._left) if raw is not None]
        return first_mismatch(list(records_of(self._logs.read()).values()) or records)

    def verdict(self, script: Path, seconds: float) -> launch.Verdict:
        """The verdict on ranks that have all passed."""
        if self._unknown:
            say(
                f"{script.name}: the collectives of {list_of(self._unknown)} were not compared with those of others: "
                "Python did not end there by itself"
            )
        reports = [launch.RankReport(rank, launch.RankEnding.PASSED, seconds, launch.now()) for rank in self._ranks]
        reports = with_collectives(reports, self._logs, self._left)
        return RankEvidence(tuple(reports), note=self._note).verdict(case_of(script.name, str(script)))
