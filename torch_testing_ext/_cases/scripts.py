"""`run_script`: a script that is meant for torchrun, in ranks of ours, or under torchrun itself."""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext import _torch, launch
from torch_testing_ext.launch import settings

from . import group_creation, launched_ranks, rank_environment, rank_process, ranked, under_torchrun
from .spawning import print_output

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
    size = ranked.checked_world_size(ranks, "ranks")
    launched_ranks.refuse("run_script")
    script = Path(path).absolute()
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher is {launcher!r}; it must be one of {LAUNCHERS}")
    words = [str(arg) for arg in args]
    if launcher is not None:
        return ScriptRun((under_torchrun.run(script, words, size, env or {}, timeout),))
    with ranked.without_our_traceback():
        chosen = settings.read()
        ranked.say_if_nothing_is_recorded()
        directory = launch.new_directory(script.name)
    try:
        with rank_environment.leased(size) as addresses:
            run = _start(script, words, size, env or {}, directory, addresses, chosen)
            limit = None if chosen.debug_rank is not None else timeout or ranked.TIMEOUT_DEFAULT
            result = launch.watch(run, limit, launch.Expected())
        verdict = result.verdict(launch.Case(script.name, file=str(script)))
        outputs = tuple(
            (directory / f"rank{rank}.log").read_text(errors="replace") for rank in _logged(directory, size)
        )
        if verdict.outcome is launch.Outcome.PASSED:
            print_output(directory, size)
    finally:
        if chosen.logs is None:
            shutil.rmtree(directory, ignore_errors=True)
    ranked.raise_verdict(None, verdict)
    return ScriptRun(outputs)


def _logged(directory: Path, size: int) -> list[int]:
    return [rank for rank in range(size) if (directory / f"rank{rank}.log").exists()]


def _start(
    script: Path,
    words: list[str],
    size: int,
    env: Mapping[str, str],
    directory: Path,
    addresses: dict[str, str],
    chosen: settings.Settings,
) -> launch.Run:
    __tracebackhide__ = True
    body = launch.Named.of(_run)
    environ = {**os.environ, **addresses, **env}
    job = launch.Job(
        body=body,
        subject=body,
        world_size=size,
        directory=directory,
        context=launch.ProcessContext(environ, os.getcwd(), _search_path(script), (str(script), *words)),
        arguments={
            "script": str(script),
            "world_size": size,
            "directory": directory,
            "patient": chosen.debug_rank is not None,
        },
        stream=chosen.stream,
        debug_rank=chosen.debug_rank,
        sanitize=ranked.sanitize_with(()),
    )
    with ranked.without_our_traceback():
        return launch.launch_fresh(job)


def _search_path(script: Path) -> tuple[str, ...]:
    """As for a new interpreter: what pytest, say, has put before it comes last."""
    usual = _usual_path(sys.executable, os.environ.get("PYTHONPATH", ""))
    return (str(script.parent), *usual, *(entry for entry in sys.path if entry not in usual))


@functools.cache
def _usual_path(executable: str, python_path: str) -> tuple[str, ...]:
    done = subprocess.run(
        [executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"], capture_output=True, check=True
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def _run(
    subject: Any,
    rank: int,
    account: launch.AccountWriter,
    *,
    script: str,
    world_size: int,
    directory: Path,
    patient: bool,
) -> None:
    """The body of a rank's process."""
    rank_environment.become(rank)
    rank_process.prepare_rank(rank, world_size, patient)
    group_creation.announce(directory, rank)
    try:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        _end_as_an_interpreter()
        rank_process.leave_process_group(fast=True)
        account.passed()
    except Exception as error:
        ranked.account_for_error(account, error)
    finally:
        _torch.end_compile_workers()
        group_creation.wait_for_peers()


def _end_as_an_interpreter() -> None:
    """Do what Python does when a script is over, since a rank ends by os._exit."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
