"""One run, from its options to its exit code: discover, select, plan, then list, forecast or run.

Misspelt names are reported before the modules that run and report tests are imported, which takes longer.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .events import RunEnded, Warned
from .model import Attempt, ExitCode, Summary, Test, TestId, exit_code
from .options.options import Action, Options, Rerun
from .scheduling.durations import Durations, LastFailed
from .scheduling.forecast import forecast
from .scheduling.inventory import Inventory, make_inventory
from .scheduling.leases import Leases
from .scheduling.plan import Plan, plan, priority, shard
from .scheduling.policy import Queue, typical_seconds
from .selection.files import test_files
from .selection.ports import notes_on_ports, with_ports
from .selection.selection import Selection

if TYPE_CHECKING:
    from .processes.zygote import Discovery, Zygote


@dataclass(frozen=True)
class Work:
    """The result of discovery and planning, to run or to list."""

    plan: Plan
    broken: tuple[Attempt, ...]  # files that cannot be imported
    inventory: Inventory
    discovered: tuple[TestId, ...]  # all tests of the imported files, selected or not

    @property
    def tests(self) -> tuple[Test, ...]:
        return (*self.plan.tests, *(attempt.test for attempt in self.broken))


class Session:
    """One invocation of run_test.py."""

    def __init__(self, options: Options, root: Path):
        self._options = dataclasses.replace(options, seed=_seed(options))
        self._root, self._cwd = root, Path.cwd()
        self._warnings: list[str] = []
        self._durations = Durations(options.cache, self._warnings.append)
        self._last_failed = LastFailed(options.cache, self._warnings.append)

    def run(self) -> int:
        """Does what the options say, and returns the exit code."""
        selection = Selection.of(self._options, self._root, self._cwd)
        known_files = test_files(self._options, self._root, self._cwd)
        files = selection.files(known_files)
        from .processes.zygote import Zygote

        with Zygote(self._root, drop_in=bool(self._options.drop_in)) as zygote:
            try:
                work = self._work(zygote, selection, files, known_files)
            except KeyboardInterrupt:
                print("interrupted before the first test started\n0 passed, 0 failed, 0 skipped")
                return ExitCode.INTERRUPTED
            match self._options.action:
                case Action.LIST:
                    return self._list(work)
                case Action.DRY_RUN:
                    return self._dry_run(work)
                case _:
                    return self._run(zygote, work)

    # -- from names to work

    def _work(self, zygote: Zygote, selection: Selection, files: Sequence[str], known_files: Sequence[str]) -> Work:
        inventory = make_inventory(self._options, os.environ, *zygote.count_devices())
        discovery = zygote.discover(files, inventory.most_at_once, self._options.jobs)
        self._warnings.extend(discovery.warnings)
        tests, broken = self._in_shard(selection.tests(discovery.tests, known_files), discovery.broken)
        tests = tuple(with_ports(tests, self._root))
        planned = plan(self._to_rerun(tests), inventory, self._durations.expected, self._options.repeat or 1)
        if self._options.jobs > 1:
            self._warnings.extend(notes_on_ports(planned.units))
        return Work(planned, broken, inventory, _discovered(discovery))

    def _in_shard(
        self, tests: Sequence[Test], broken: Sequence[Attempt]
    ) -> tuple[tuple[Test, ...], tuple[Attempt, ...]]:
        """The tests and broken files of this shard. A broken file counts as a test, so exactly one shard reports it."""
        part = self._options.shard
        if part is None:
            return tuple(tests), tuple(broken)
        everything = (*tests, *(attempt.test for attempt in broken))
        kept = {test.id for test in shard(everything, part, self._durations.expected)}
        return tuple(t for t in tests if t.id in kept), tuple(a for a in broken if a.test.id in kept)

    def _to_rerun(self, tests: Sequence[Test]) -> Sequence[Test]:
        if self._options.rerun is not Rerun.LAST_FAILED:
            return tests
        failed = [test for test in tests if self._last_failed.failed(test.id)]
        if not failed:
            self._warnings.append("none of the selected tests failed in its last run: running all of them")
        return failed or tests

    # -- what to do with it

    def _list(self, work: Work) -> int:
        from .report import listing

        self._warn_on_stderr()
        if self._options.json:
            print(listing.as_json(work.plan.tests, work.broken, self._durations.expected))
        else:
            print("\n".join(listing.as_text(work.plan.tests, work.broken)))
        return _code_without_running(work)

    def _dry_run(self, work: Work) -> int:
        from .report import listing

        self._warn_on_stderr()
        typical = typical_seconds(work.plan.units)
        leases = self._leases(work)
        starts = forecast(
            self._queue(work, leases), leases, lambda unit: typical if unit.seconds is None else unit.seconds
        )
        print("\n".join(listing.schedule_as_text(list(starts))))
        return _code_without_running(work)

    def _warn_on_stderr(self) -> None:
        """Programs may read the list on stdout."""
        for warning in self._warnings:
            print(f"warning: {warning}", file=sys.stderr)

    def _run(self, zygote: Zygote, work: Work) -> int:
        from .engine.local import Engine
        from .report import make_reporters

        reporters = make_reporters(self._options, sys.stdout, os.environ)
        if not work.tests:
            self._warnings.append("nothing is selected: no test matches")
        for warning in self._warnings:
            reporters.on_event(Warned(warning))
        leases = self._leases(work)
        queue = self._queue(work, leases)
        engine = Engine(zygote, self._options, work.inventory, leases, queue, reporters)
        summary = engine.run(work.plan, work.broken)
        self._record(summary, work)
        warnings = dict.fromkeys((*self._warnings, *summary.warnings, *zygote.warnings))
        reporters.on_event(RunEnded(dataclasses.replace(summary, warnings=tuple(warnings))))
        return exit_code(summary, self._options.allow_all_skipped)

    def _queue(self, work: Work, leases: Leases) -> Queue:
        return Queue(
            work.plan.units,
            len(work.inventory.names),
            self._options.jobs,
            priority(self._options, self._last_failed.failed),
            leases.may_run_now,
        )

    def _leases(self, work: Work) -> Leases:
        return Leases(work.inventory.names, self._options.jobs)

    def _record(self, summary: Summary, work: Work) -> None:
        """A shard records no durations: that would change how the tests are split for the shards that run after it."""
        if self._options.shard is None:
            self._durations.record(summary.finished)
        self._last_failed.record(summary, work.discovered)


def _seed(options: Options) -> int | None:
    """A random seed if none is given, so that the report can name the seed of the order."""
    return random.randrange(2**32) if options.shuffle and options.seed is None else options.seed


def _discovered(discovery: Discovery) -> tuple[TestId, ...]:
    return (*(test.id for test in discovery.tests), *(attempt.test.id for attempt in discovery.broken))


def _code_without_running(work: Work) -> int:
    if not work.tests:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.FAILED if work.broken else ExitCode.PASSED
