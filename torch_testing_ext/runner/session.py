"""One run, from its options to its exit code: discover, select, plan, then list, forecast or run.

Each step is a function of the results of those before: `Options` -> `Chosen` -> `Work` -> `Summary`. Misspelt names are
reported before the modules that run and report tests are imported, which takes longer.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .events import AttemptEnded, Reporters, RunBegan, RunEnded, TestFinished, Warned
from .header import CommitQuery, make_header
from .model import Attempt, ExitCode, FinishedTest, Summary, Test, TestId, TestOutcome, exit_code
from .options.options import Action, CannotRun, Options, Rerun, UsageError
from .run_site import RunSite, Work, on_this_machine
from .scheduling.earlier_runs import EarlierRuns
from .scheduling.forecast import forecast
from .scheduling.inventory import Inventory
from .scheduling.plan import describe_undeclared, plan, priority, shard, without_result
from .scheduling.policy import Priority, typical_seconds
from .selection.discovery import test_files
from .selection.selection import Selection

if TYPE_CHECKING:
    from .engine.signals_and_keys import Deferred
    from .processes.file_processes import Discovery


@dataclass(frozen=True)
class Chosen:
    """The files that the user chose by names, and the selection of their tests."""

    selection: Selection
    files: tuple[str, ...]
    known_files: Sequence[str]

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Chosen:
        selection, known = Selection.of(options, root, cwd), test_files(options, root, cwd)
        return cls(selection, selection.files(known), known)


def run(options: Options, root: Path) -> int:
    """Does what the options say, and returns the exit code."""
    options = dataclasses.replace(options, seed=_seed(options))
    chosen = Chosen.of(options, root, Path.cwd())
    earlier = EarlierRuns(options)
    if options.action is Action.RUN:
        return _run(options, root, chosen, earlier)
    with _open_site(options, root, chosen.files) as site:
        work = find_work(options, chosen, earlier, site)
    for warning in (*earlier.warnings, *work.warnings):
        print(f"warning: {warning}", file=sys.stderr)  # programs may read the list on stdout
    if options.action is Action.LIST:
        _list(work, earlier)
    else:
        _dry_run(work, site, _first(work, earlier))
    if not work.tests:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.FAILED if work.broken else ExitCode.PASSED


def _seed(options: Options) -> int | None:
    """A random seed if none is given, so that the report can name the seed of the order."""
    return random.randrange(2**32) if options.shuffle and options.seed is None else options.seed


def _open_site(options: Options, root: Path, files: Sequence[str]) -> AbstractContextManager[RunSite]:
    if options.cluster is None:
        return on_this_machine(options, root, files)
    from .cluster.cluster_site import on_cluster

    return on_cluster(options, root)


def _first(work: Work, earlier: EarlierRuns) -> Priority:
    return priority(work.options, earlier.last_failed.failed)


# -- from names to work


def find_work(options: Options, chosen: Chosen, earlier: EarlierRuns, site: RunSite) -> Work:
    """Import the files, and plan the tests that are selected."""
    found = site.discover(chosen.files)
    discovery, options = found.discovery, dataclasses.replace(options, jobs=found.slots)
    not_run = {attempt.test.id: attempt for attempt in discovery.not_run}
    known = (*discovery.tests, *(attempt.test for attempt in discovery.not_run))
    selected = chosen.selection.tests(known, chosen.known_files)
    broken = (*discovery.broken, *(not_run[test.id] for test in selected if test.id in not_run))
    tests, broken = _in_shard(options, earlier, [test for test in selected if test.id not in not_run], broken)
    to_run, note = _to_rerun(options, earlier, tests)
    planned = plan(to_run, found.inventory, earlier.durations.expected, options.repeat or 1)
    warnings = _each_once(found.warnings, site.warnings, discovery.warnings, note)
    return Work(options, planned, broken, found.inventory, _discovered(discovery), warnings)


def _in_shard(
    options: Options, earlier: EarlierRuns, tests: Sequence[Test], broken: Sequence[Attempt]
) -> tuple[tuple[Test, ...], tuple[Attempt, ...]]:
    """The tests and broken files of this shard. A broken file counts as a test, so exactly one shard reports it."""
    part = options.shard
    if part is None:
        return tuple(tests), tuple(broken)
    everything = (*tests, *(attempt.test for attempt in broken))
    kept = {test.id for test in shard(everything, part, earlier.durations.expected)}
    return tuple(t for t in tests if t.id in kept), tuple(a for a in broken if a.test.id in kept)


def _to_rerun(
    options: Options, earlier: EarlierRuns, tests: tuple[Test, ...]
) -> tuple[tuple[Test, ...], tuple[str, ...]]:
    """With --last-failed, the tests that failed; all, and a warning, if none did."""
    if options.rerun is not Rerun.LAST_FAILED:
        return tests, ()
    failed = tuple(test for test in tests if earlier.last_failed.failed(test.id))
    if failed:
        return failed, ()
    return tests, ("none of the selected tests failed in its last run: running all of them",)


def _discovered(discovery: Discovery) -> tuple[TestId, ...]:
    attempts = (*discovery.broken, *discovery.not_run)
    return (*(test.id for test in discovery.tests), *(attempt.test.id for attempt in attempts))


def _each_once(*warnings: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one for some in warnings for one in some))


# -- what to do with it


def _list(work: Work, earlier: EarlierRuns) -> None:
    from .report import listing

    if work.options.json:
        print(listing.as_json(work.plan.tests, work.broken, earlier.durations.expected))
    else:
        print("\n".join(listing.as_text(work.plan.tests, work.broken)))


def _dry_run(work: Work, site: RunSite, first: Priority) -> None:
    from .report import listing

    typical = typical_seconds(work.plan.units)
    starts = forecast(*site.schedule(work, first), lambda unit: typical if unit.seconds is None else unit.seconds)
    print("\n".join(listing.schedule_as_text(list(starts))))


def _run(options: Options, root: Path, chosen: Chosen, earlier: EarlierRuns) -> int:
    """Runs the tests. Whatever ends the run, its reports have all results so far, and say what ended it."""
    from .engine.signals_and_keys import Deferred

    site: RunSite | None = None
    reporters: Reporters | None = None
    with ExitStack() as owner:
        commit = CommitQuery(root)
        try:
            owner.enter_context(commit)
            site = owner.enter_context(_open_site(options, root, chosen.files))
            reporters = _reporters(options)  # while the zygote imports torch
            work = find_work(options, chosen, earlier, site)
            deferred = owner.enter_context(Deferred())  # from now on, all of this is done before a signal counts
        except UsageError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            deferred = owner.enter_context(Deferred())
            reporters = reporters or _reporters(options)
            warnings = _each_once(earlier.warnings, () if site is None else site.warnings)
            summary = _without_work(options, chosen.files, commit, error, reporters, warnings)
        else:
            summary = _run_work(work, site, earlier, commit, reporters, deferred)
        reporters.on_event(RunEnded(summary))
        _print_errors(summary, reporters)
    return exit_code_with(reporters, exit_code(summary, options.allow_all_skipped))


def _reporters(options: Options) -> Reporters:
    from .report import make_reporters

    return make_reporters(options, sys.stdout, os.environ)


def _run_work(
    work: Work, site: RunSite, earlier: EarlierRuns, commit: CommitQuery, reporters: Reporters, deferred: Deferred
) -> Summary:
    header = make_header(commit, work.inventory, site.torch_version)
    engine, late = site.engine(work, _first(work, earlier), reporters, header)
    nothing = () if work.tests else ("nothing is selected: no test matches",)
    warnings = _each_once(earlier.warnings, work.warnings, nothing, late)
    for warning in warnings:
        reporters.on_event(Warned(warning))
    summary = engine.run(work.plan, work.broken, lambda: deferred.reason)
    for lost in without_result(work.plan, summary):
        reporters.on_event(AttemptEnded(lost.last, retry=False))
        reporters.on_event(TestFinished(lost))
        summary = dataclasses.replace(summary, finished=(*summary.finished, lost))
    try:
        earlier.record(summary, work.discovered)
    except Exception:
        summary = dataclasses.replace(summary, error=summary.error or traceback.format_exc())
    undeclared = describe_undeclared(summary.finished) if work.inventory.names and not work.inventory.fake else None
    found = _each_once(
        warnings, earlier.warnings, summary.warnings, site.warnings, () if undeclared is None else (undeclared,)
    )
    return dataclasses.replace(summary, warnings=found)


def _without_work(
    options: Options,
    files: Sequence[str],
    commit: CommitQuery,
    error: BaseException,
    reporters: Reporters,
    warnings: tuple[str, ...],
) -> Summary:
    """The summary of a run that ended before its tests were known: each file stands for its tests."""
    tests = tuple(Test(TestId(file)) for file in files)
    slots = options.jobs if options.cluster is None else 1  # of a cluster, they are not known
    reporters.on_event(RunBegan(tests, (), (), slots, time.time(), header=make_header(commit, Inventory(), "")))
    if isinstance(error, KeyboardInterrupt):
        reporters.on_event(Warned("interrupted before the first test started"))
        return Summary((), 0.0, options.policy, interrupted=True, unfinished=tests)
    ours = not isinstance(error, CannotRun)
    why = "".join(traceback.format_exception(error)) if ours else str(error)
    finished = []
    for test in tests:
        attempt = Attempt(test, TestOutcome.ERROR, f"it was not run: {why.strip().splitlines()[-1 if ours else 0]}")
        finished.append(FinishedTest((attempt,)))
        reporters.on_event(AttemptEnded(attempt, retry=False))
        reporters.on_event(TestFinished(finished[-1]))
    return Summary(tuple(finished), 0.0, options.policy, warnings=warnings, error=why)


def _print_errors(summary: Summary, reporters: Reporters) -> None:
    """Errors of ours, which the console may be unable to print."""
    errors = [f"internal error in a report; this is not a test failure:\n{error}" for error in reporters.errors]
    with suppress(OSError, ValueError):
        for error in [summary.error, *errors] if summary.error else errors:
            print(f"run_test.py: {error}", file=sys.stderr)


def exit_code_with(reporters: Reporters, code: ExitCode) -> ExitCode:
    """The exit code of a run, which is not a success if a report raised an exception of ours."""
    red = code in (ExitCode.FAILED, ExitCode.INTERRUPTED)
    return code if red or not reporters.errors else ExitCode.OUR_ERROR
