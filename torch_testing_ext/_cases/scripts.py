"""`run_script`: a script that is meant for torchrun, in ranks of ours, or under torchrun itself."""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch_testing_ext import launch

from . import launched_ranks, under_torchrun
from .accounting import account_for_error
from .jobs import run_to_end
from .rank_life import run_rank
from .ranked import checked_world_size
from .verdicts import without_our_traceback

__unittest = True
__rank_frame__ = True

LAUNCHERS = (None, "torchrun")


@dataclass(frozen=True)
class ScriptRun:
    """A script that has run to its end in every rank."""

    outputs: tuple[str, ...]  # stdout and stderr of each rank; of torchrun, one text for all


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
    __tracebackhide__ = True
    size = checked_world_size(ranks, "ranks")
    launched_ranks.refuse("run_script")
    script = Path(path).absolute()
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher is {launcher!r}; it must be one of {LAUNCHERS}")
    words = [str(arg) for arg in args]
    if launcher is not None:
        return ScriptRun((under_torchrun.run(script, words, size, env or {}, timeout),))
    case = launch.Case(script.name, file=str(script))

    def start(make_job: Callable[..., launch.Job]) -> launch.Run:
        __tracebackhide__ = True
        job = make_job(_run, arguments={"script": str(script)})
        environ = {**job.context.environ, **(env or {})}
        there = launch.ProcessContext(environ, os.getcwd(), _search_path(script), (str(script), *words))
        with without_our_traceback():
            return launch.launch_fresh(replace(job, context=there))

    return ScriptRun(run_to_end(case, size, timeout, start, launch.Expected()))


def _search_path(script: Path) -> tuple[str, ...]:
    """The sys.path of a new interpreter, then entries that pytest, say, has inserted."""
    usual = _usual_path(sys.executable, os.environ.get("PYTHONPATH", ""))
    return (str(script.parent), *usual, *(entry for entry in sys.path if entry not in usual))


@functools.cache
def _usual_path(executable: str, python_path: str) -> tuple[str, ...]:
    done = subprocess.run(
        [executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"], capture_output=True, check=True
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def _run(context: launch.RankContext, script: str) -> None:
    """The body of a rank."""

    def body() -> None:
        try:
            _run_as_main(script)
            _end_as_an_interpreter()
        except SystemExit:
            raise
        except BaseException as error:
            account_for_error(context.account, error)  # a script cannot skip

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
