"""`run_script`: a script that is meant for torchrun, in ranks of ours, or under torchrun itself."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_testing_ext import launch
from torch_testing_ext._process import user_commands
from torch_testing_ext._testing.bases import launched_ranks, ranked_test_case
from torch_testing_ext._testing.bases.invocation import case_of
from torch_testing_ext._testing.bases.rank_accounts import account_for_error
from torch_testing_ext._testing.bases.rank_life import run_rank
from torch_testing_ext._testing.bases.rank_verdicts import raise_verdict
from torch_testing_ext._testing.bases.ranked_test_case import checked_world_size
from torch_testing_ext._testing.bases.shown_ranks import ShownRanks
from torch_testing_ext._testing.bases.spawned_functions import need_of_devices
from torch_testing_ext._testing.bases.torchrun_scripts import TorchrunRanks
from torch_testing_ext.launch import session
from torch_testing_ext.launch.aspects import warnings_in_rank
from torch_testing_ext.launch.attempts import RankAttempt, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


LAUNCHERS = (None, "torchrun")


@dataclass(frozen=True)
class ScriptRun:
    """The output of a script that has finished in every rank."""

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
    that has imported torch. Arguments may be a list. `launcher="torchrun"` starts the ranks with torchrun itself,
    which takes seconds, and compares their collectives only at the end. `timeout` and `devices` are as in `spawn`.
    """
    size = checked_world_size(world_size, "world_size")
    launched_ranks.refuse("run_script")
    script = Path(path).absolute()
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher is {launcher!r}; it must be one of {LAUNCHERS}")
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    words = [str(arg) for arg in itertools.chain.from_iterable(lists)]
    kind = _ScriptRanks if launcher is None else TorchrunRanks
    host = kind(script, words, env or {})
    plan = TestPlan(
        replace(case_of(script.name, str(script)), is_script=True),
        size,
        timeout or ranked_test_case.TIMEOUT_DEFAULT,
        devices=need_of_devices(devices, size, name=script.name),
    )
    raise_verdict(session.run(host, plan))
    return ScriptRun(host.outputs)


class _ScriptRanks(ShownRanks):
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
            with warnings_in_rank.uncaught_in_threads() as dead:
                _run_as_main(script)
                _end_as_an_interpreter()
            warnings_in_rank.raise_of_collectives(dead)
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
    # It tells the threads of pools to end, which wait for more to do.
    threading._shutdown()  # type: ignore[attr-defined, unused-ignore]
    atexit._run_exitfuncs()
