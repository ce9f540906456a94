"""The forks of a whole world: each rank runs by itself, and leaves a log and a result."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from torch_testing_ext._collectives.sanitizer.sanitizer_log import LogReader, LogWriter
from torch_testing_ext._collectives.worlds import world_views
from torch_testing_ext._collectives.worlds.world_records import WorldRecords
from torch_testing_ext._process import ends, fork_safety, sessions, signals, system
from torch_testing_ext._process.source_files import is_library
from torch_testing_ext._testing.bases.rank_in_world import NotForWorlds, PlaceInWorld, RankInWorld
from torch_testing_ext._torch import imported_garbage
from torch_testing_ext.launch.account_writer import format_error, sites_of, summarize
from torch_testing_ext.launch.fork_server import MANY_RANKS

_STACKS, _LOG, _RESULT = "stacks", "log", "result"


# The exit code of a rank that has no result.
_CANNOT_WRITE = 74


class Ranks:
    """Runs all ranks, each in a fork, and collects what they have left."""

    def __init__(
        self, folder: Path, world_size: int, timeout: float, body: Callable[[int], object], is_test: bool = False
    ):
        self._folder = folder
        self.world_size = world_size
        self._is_test = is_test
        self._timeout = timeout
        self._body = body
        self._running: dict[int, int] = {}
        self.records = WorldRecords()
        # By rank: one line, and the traceback.
        self.errors: dict[int, tuple[str, str]] = {}
        # Those that failed by an assertion.
        self.assertions: dict[int, bool] = {}
        # By text: the ranks.
        self.warnings: dict[str, list[int]] = {}
        self.memory: list[int] = []
        # Of a test: the lines whose assertions compare values that were not communicated; those that ended a rank.
        self.not_judged: dict[str, None] = {}
        self.cuts: dict[str, None] = {}
        self._imported: list[str] = []

    def run(self) -> None:
        """Run all ranks, and end those that are left if this is interrupted."""
        most = system.cores()
        try:
            for rank in range(self.world_size):
                self._running[self._fork(rank)] = rank
                if rank == 0:
                    _require_forks(fork_safety.check_after_fork())
                    self._wait()
                    self._preload()
                    if self.world_size >= MANY_RANKS:
                        # A fork then copies fewer page tables.
                        system.collapse_all()
                if len(self._running) >= most:
                    self._wait()
                if self.errors and len(self.errors) >= _ENOUGH_ERRORS:
                    break
            while self._running:
                self._wait()
        finally:
            for pid in self._running:
                signals.signal_group(pid, 9)
                ends.wait_for_exit(pid)

    def _preload(self) -> None:
        """Import what rank 0 has imported of torch: else all ranks do so again, which may take seconds."""
        for name in self._imported:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if self._imported:
            _require_forks(fork_safety.check_after_fork())

    def _fork(self, rank: int) -> int:
        place = PlaceInWorld(self._folder, rank, self.world_size, list(self._running))
        return sessions.fork_child(lambda: _run_rank(place, self._timeout, self._body, self._is_test))

    def _wait(self) -> None:
        """Wait for the end of one rank, and take what it has left."""
        pid = next(iter(self._running))
        # In their order: the ranks are alike, and their records are kept by rank.
        code = ends.wait_and_end_group(pid)
        rank = self._running.pop(pid)
        files = {name: self._folder / f"{rank}.{name}" for name in (_LOG, _RESULT, _STACKS, "output")}
        result: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            result = json.loads(files[_RESULT].read_text("utf-8"))
        output = files["output"].read_text("utf-8", "replace") if files["output"].exists() else ""
        if "skipped" in result:
            raise unittest.SkipTest(result["skipped"])
        if self._is_test and "unsuitable" in result:
            raise unittest.SkipTest(world_views.not_in_world(self.world_size, result["unsuitable"]))
        if "error" in result:
            self.assertions[rank] = result["failed"]
            self.errors[rank] = result["error"], "\n".join([result["traceback"], output])
        elif not result:
            stacks = files[_STACKS].read_text("utf-8", "replace") if files[_STACKS].exists() else ""
            how = ends.describe_exit(code)
            if code == _CANNOT_WRITE:
                how = f"could not write its result into {self._folder}"
            if "Timeout" in stacks:
                how = f"has not ended within {self._timeout:g} s"
            self.errors[rank] = how, f"{stacks}\n{output}"
        else:
            self._imported = result["imported"]
            self.memory.append(result["memory"])
            for text in result["warnings"]:
                self.warnings.setdefault(text, []).append(rank)
            self.not_judged.update(dict.fromkeys(result["not_judged"]))
            self.cuts.update(dict.fromkeys(result["cut"]))
            if not self.errors:
                self.records.add([LogReader(files[_LOG])])
        for file in files.values():
            file.unlink(missing_ok=True)


def _require_forks(unsafe: str | None) -> None:
    """Raise an error if there is a reason why this process cannot fork."""
    if unsafe is not None:
        raise RuntimeError(f"the ranks of a whole world are forks, and this process cannot fork: {unsafe}")


# Enough to see which ranks fail alike.
_ENOUGH_ERRORS = 64


def _run_rank(place: PlaceInWorld, timeout: float, body: Callable[[int], object], is_test: bool) -> NoReturn:
    """Be one rank: run the body, and leave a log and a result."""
    folder, rank = place.folder, place.rank
    imported_garbage.exempt_imported(None)
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    sessions.detach(output)
    signals.unblock()
    with open(folder / f"{rank}.{_STACKS}", "w") as stacks:  # closed by the end
        faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
        result: dict[str, Any] = {}
        before = set(sys.modules)
        try:
            torch.set_num_threads(1)
            in_world = RankInWorld(LogWriter(folder / f"{rank}.{_LOG}"), place, timeout)
            cut = []
            try:
                with in_world.active(judges=not is_test):
                    body(rank)
            except AssertionError as error:
                if not is_test or not in_world.uses.has_read:
                    raise
                cut = [place_of(error)]
            finally:
                in_world.finish()
            imported = [name for name in sys.modules if name not in before and name.startswith("torch.")]
            uses = in_world.uses
            result = {"memory": uses.most, "warnings": uses.warnings, "imported": imported}
            result |= {"not_judged": list(uses.not_judged), "cut": cut}
        except BaseException as error:
            result = {"error": _line_of(error), "traceback": format_error(error)}
            result["failed"] = isinstance(error, AssertionError)
            if isinstance(error, NotForWorlds):
                result["unsuitable"] = f"{error.what}   {place_of(error)}".rstrip()
            # That of unittest, or of pytest.
            if isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped":
                result["skipped"] = str(error)
        try:
            (folder / f"{rank}.{_RESULT}").write_text(json.dumps(result), "utf-8")
        except OSError:
            sessions.exit_now(_CANNOT_WRITE)
        sessions.exit_now(0)


def _line_of(error: BaseException) -> str:
    """Describe an exception by its first line, and the line of the program that raised it."""
    place = place_of(error)
    return summarize(error) + (f"   {place}" if place else "")


def place_of(error: BaseException) -> str:
    """The line of the program that raised an exception."""
    own = [site for site in sites_of(error) if not is_library(site.file)]
    return str(own[-1]) if own else ""
