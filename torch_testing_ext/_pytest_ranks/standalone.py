"""The mark `standalone`: the test runs in a new interpreter of its own, which runs nothing else. The parent's side.

All of its fixtures are set up there. The new interpreter judges the test; what it reports is reported here.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._process import messages, system
from torch_testing_ext._process.running_coverage import current_coverage
from torch_testing_ext._pytest_ranks.marks import SPEC
from torch_testing_ext._testing.bases import launched_ranks, ranked_test_case
from torch_testing_ext._testing.bases.limited_commands import run_limited
from torch_testing_ext._testing.bases.rank_verdicts import RankError

from .pytest_internals import configuration, item_state
from .standalone_process import PROCESS, FromStandalone, StandaloneTest
from .standalone_verdict import judge, show

_STACKS_TIMEOUT = 2.0
# The seconds beyond the time limit of the ranks for the interpreter of their test to start and end.
_BEYOND_RANKS = 60.0


def set_up(item: Any) -> None:
    """Prepare the set-up of a test: leave all of its fixtures to the new interpreter."""
    where = launch.this_launch()
    if where is not None:
        launched_ranks.check_launch()
        why = f"a standalone test starts an interpreter of its own, and a launcher has started {where.world_size} ranks"
        raise item_state.skip_at_test(why)
    item.funcargs.update(dict.fromkeys(item.fixturenames))


def run(item: Any, timeout: float | None) -> None:
    """Run a test in a new interpreter; raise what it would raise here."""
    __tracebackhide__ = True
    if item.config.getoption("usepdb", False) or item.config.getoption("trace", False):
        raise RankError(
            f"a debugger has no terminal in a standalone test. Run pytest -p no:torch_testing_ext.pytest_plugin for it "
            f"alone: {item.nodeid}"
        )
    launch.keep_directory()
    directory = launch.new_directory(item.nodeid)
    try:
        _write_test(item, directory)
        code, how, output = _run_process(item, directory, _limit(item, timeout))
        received = _messages(directory)
        show(item, received, output)
        judge(item, received, code, how)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _limit(item: Any, timeout: float | None) -> float:
    """The time limit of a test in seconds: that of its mark, otherwise at least as long as its ranks may take."""
    if timeout:
        return float(timeout)
    limit = item.config.getoption("rank_timeout", None) or ranked_test_case.TIMEOUT_DEFAULT
    spec = item.stash.get(SPEC, None)
    if spec is not None:
        limit = max(limit, (spec.timeout or 0.0) + _BEYOND_RANKS)
    return float(limit)


def _write_test(item: Any, directory: Path) -> None:
    node = f"{item.path}::{item_state.name_in_file(item)}"
    base = configuration.temporary_base(item.config) / f"standalone-{directory.name}"
    options = {}
    for name, value in vars(item.config.option).items():
        # What cannot be sent has no meaning there.
        with suppress(Exception):
            options[name] = pickle.loads(pickle.dumps(value))
    if item.config.inipath is not None:
        options["inifilename"] = str(item.config.inipath)
    options |= {"rootdir": str(item.config.rootpath), "basetemp": str(base)}
    test = StandaloneTest(node, str(item.path), pickle.dumps(options), tuple(sys.path), os.getpid())
    Path(directory, "test").write_text(messages.to_json(test), encoding="utf-8")


def _environment() -> dict[str, str]:
    """Return the environment of the new interpreter, in which coverage goes on."""
    coverage = current_coverage()
    environ = dict(os.environ)
    if coverage is not None and hasattr(coverage.config, "serialize"):
        environ["COVERAGE_PROCESS_CONFIG"] = coverage.config.serialize()
    return environ


def _run_process(item: Any, directory: Path, limit: float) -> tuple[int | None, str, str]:
    """Return the exit code (None: we ended it), how the process ended, in words, and its output."""
    is_captured = item.config.getoption("capture", "no") != "no"
    with open(directory / "output", "w+", encoding="utf-8", errors="replace") as file:
        command = [sys.executable, "-m", PROCESS, str(directory)]
        log = file if is_captured else None
        cwd = item.config.invocation_params.dir
        code, how = run_limited(command, limit, _environment(), log, _end, _show_stacks, cwd)
        file.seek(0)
        output = file.read() if is_captured else ""
        return code, how, output


def _show_stacks(process: subprocess.Popen[bytes]) -> None:
    """Have faulthandler, which pytest enables, write the stacks of the process."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STACKS_TIMEOUT)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and all processes of its group."""
    pids = [process.pid, *system.group_members(process.pid)]
    has_ended = process.returncode is not None
    for pid in pids:
        if pid == process.pid and has_ended:
            continue
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _messages(directory: Path) -> list[FromStandalone]:
    kinds = messages.by_name(FromStandalone)
    with suppress(OSError):
        complete, _, _ = Path(directory, "messages").read_text(encoding="utf-8").rpartition("\n")
        return [messages.from_json(line, kinds) for line in complete.splitlines()]
    return []
