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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch_testing_ext._process import user_commands
from torch_testing_ext._process.logs import text_of

from .events import AttemptEnded, Reporter, Reporters, RunBegan, RunEnded, TestFinished, Warned
from .header import CommitQuery, make_header
from .model import Attempt, ExitCode, FinishedTest, Summary, Test, TestId, TestOutcome, exit_code
from .options.options import Action, CannotRun, Options, Rerun, UsageError
from .run_site import Found, LocalSite, Work, on_this_machine
from .scheduling.earlier_runs import EarlierRuns
from .scheduling.forecast import forecast
from .scheduling.inventory import Inventory
from .scheduling.plan import Plan, describe_undeclared, plan, priority, shard, without_result
from .scheduling.policy import Priority, typical_seconds
from .selection.affected import Affected
from .selection.discovery import test_files
from .selection.selection import Selection

if TYPE_CHECKING:
    from .cluster.cluster_site import ClusterSite
    from .engine.signals_and_keys import Deferred

    RunSite: TypeAlias = LocalSite | ClusterSite


@dataclass(frozen=True)
class Chosen:
    """The files that the user chose by names, and the selection of their tests."""

    selection: Selection
    files: tuple[str, ...]
    known_files: Sequence[str]
    root: Path
    more_files: tuple[str, ...] = ()  # to import if the tests that failed no longer exist
    affected: Affected | None = None  # which decides, too

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Chosen:
        selection, known = Selection.of(options, root, cwd), test_files(options, root, cwd)
        return cls(selection, selection.files(known), known, root)


class RunFollower(Reporter, Protocol):
    """Follows a run for another process."""

    environ: Mapping[str, str]  # of the terminal there


def run(options: Options, root: Path, more: RunFollower | None = None) -> int:
    """Does what the options say, and returns the exit code. `more`: gets the events, too."""
    if options.action is Action.RUN:
        options.require_terminal()
    if options.shuffle and options.seed is None:  # the report names the seed of the order
        options = dataclasses.replace(options, seed=random.randrange(2**32))
    chosen = Chosen.of(options, root, Path.cwd())
    if options.action is Action.CLUSTER_DRY_RUN:
        from .cluster.cluster_site import shipment

        print(shipment(root, chosen.files).describe())
        return ExitCode.PASSED
    earlier = EarlierRuns(options)
    affected = Affected(options, root, earlier)
    if options.why:
        return _explain(options, chosen, affected)
    if options.affected:
        chosen = dataclasses.replace(chosen, files=tuple(filter(affected.file_is, chosen.files)), affected=affected)
        reports = (options.junit, options.report, options.trace, options.results)
        if not chosen.files and options.action is Action.RUN and not any(reports):
            print("no test is affected: no file that a selected test has read has changed")
            return ExitCode.PASSED
    if options.action is Action.LIST and (known := affected.unchanged_tests(chosen.files)) is not None:
        return _list_known(options, chosen, earlier, known)
    if options.rerun is Rerun.LAST_FAILED:
        chosen = _with_failures(options, chosen, earlier)
    if options.action is Action.RUN:
        return _run(options, root, chosen, earlier, affected, more)
    sign = _sign_of_life()
    with _open_site(options, root, chosen.files) as site:
        work = find_work(options, chosen, earlier, site, sign, affected)
    sign.on_event(RunEnded(Summary((), 0.0, options.policy)))
    for warning in (*earlier.warnings, *work.warnings):
        print(f"warning: {warning}", file=sys.stderr)  # programs may read the list on stdout
    if options.action is Action.LIST:
        _list(work, earlier)
    else:
        _dry_run(work, site, _first(work, earlier))
    if not work.tests:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.FAILED if work.broken else ExitCode.PASSED


def _explain(options: Options, chosen: Chosen, affected: Affected) -> int:
    """Say why tests are affected, or not, without an import of their files."""
    wanted = Selection.of(dataclasses.replace(options, names=options.why), Path(), Path())
    for file in wanted.files(chosen.known_files):
        known = affected.known_tests(file) or ()
        with suppress(UsageError):
            known = wanted.tests(known, chosen.known_files)
        print("\n".join(affected.explain(file, known or [Test(TestId(file))])))
    return ExitCode.PASSED


def _open_site(options: Options, root: Path, files: Sequence[str]) -> AbstractContextManager[RunSite]:
    if options.cluster is None:
        return on_this_machine(options, root, files)
    from .cluster.cluster_site import on_cluster

    return on_cluster(options, root, files)


def _first(work: Work, earlier: EarlierRuns) -> Priority:
    return priority(work.options, earlier.last_failed.failed)


# -- from names to work


def find_work(
    options: Options, chosen: Chosen, earlier: EarlierRuns, site: RunSite, reporter: Reporter, affected: Affected
) -> Work:
    """Import the files, and plan the tests that are selected."""
    found = site.discover(chosen.files, reporter)
    discovered = _discovered(found)
    affected.record(site.reads(), discovered)
    discovery, options = found.discovery, dataclasses.replace(options, jobs=found.slots)
    not_run = {attempt.test.id: attempt for attempt in discovery.not_run}
    known = (*discovery.tests, *(attempt.test for attempt in discovery.not_run))
    selected = chosen.selection.tests(known, chosen.known_files)
    broken = (*discovery.broken, *(not_run[test.id] for test in selected if test.id in not_run))
    tests, broken = _in_shard(options, earlier, [test for test in selected if test.id not in not_run], broken)
    to_run, note = _to_rerun(options, earlier, chosen, tests)
    if note and chosen.more_files:
        everything = dataclasses.replace(chosen, files=chosen.more_files, more_files=())
        return find_work(options, everything, earlier, site, reporter, affected)
    has_failed = earlier.last_failed.has_failures if options.rerun is Rerun.LAST_FAILED and not note else None
    broken, unneeded = _broken_files(chosen, has_failed, broken)
    planned = plan(to_run, found.inventory, earlier.durations.expected, options.repeat or 1)
    warnings = _each_once(found.warnings, site.warnings, discovery.warnings, unneeded, note)
    return Work(options, planned, broken, found.inventory, discovered, warnings)


def _broken_files(
    chosen: Chosen, has_failed: Callable[[str], bool] | None, broken: Iterable[Attempt]
) -> tuple[tuple[Attempt, ...], tuple[str, ...]]:
    """The files that may have selected tests, and a warning for each of the others. `has_failed`: only such files."""
    failing, warnings = [], []
    for attempt in broken:
        file = attempt.test.id.file
        is_wanted = has_failed is None or has_failed(file)
        if attempt.test.id.method or (
            is_wanted and chosen.selection.may_select_from(file, text_of(chosen.root / file))
        ):
            failing.append(attempt)
        else:
            warnings.append(f"{file} cannot be imported; none of its tests seems to be selected: {attempt.title}")
    return tuple(failing), tuple(warnings)


def _with_failures(options: Options, chosen: Chosen, earlier: EarlierRuns) -> Chosen:
    """For --last-failed: first of all the files with tests that failed, unless the selection is of single tests."""
    by_test = options.keyword or options.marks or any("::" in name for name in (*options.names, *options.include))
    files = tuple(file for file in chosen.files if earlier.last_failed.has_failures(file))
    if by_test or not files or options.shard is not None:
        return chosen
    return dataclasses.replace(chosen, files=files, more_files=chosen.files)


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
    options: Options, earlier: EarlierRuns, chosen: Chosen, tests: tuple[Test, ...]
) -> tuple[tuple[Test, ...], tuple[str, ...]]:
    """With --affected, the affected tests. With --last-failed, those that failed; all, and a warning, if none did."""
    if chosen.affected is not None:
        tests = tuple(test for test in tests if chosen.affected.why(test.id) is not None)
    if options.rerun is not Rerun.LAST_FAILED:
        return tests, ()
    failed = tuple(test for test in tests if earlier.last_failed.failed(test.id))
    if failed:
        return failed, ()
    return tests, ("none of the selected tests failed in its last run: running all of them",)


def _discovered(found: Found) -> tuple[Test, ...]:
    attempts = (*found.discovery.broken, *found.discovery.not_run)
    tests = plan(found.discovery.tests, found.inventory, lambda test: None).tests
    return (*tests, *(attempt.test for attempt in attempts))


def _each_once(*warnings: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one for some in warnings for one in some))


# -- what to do with it


def _sign_of_life() -> Reporter:
    """A line on the terminal while files are imported, although stdout may be for a program."""
    from .report.status_line import StatusLine
    from .report.terminal import TerminalStream, columns, is_terminal

    if not is_terminal(sys.stderr, os.environ):
        return Reporters(())
    return StatusLine(TerminalStream(sys.stderr), lambda: columns(sys.stderr, os.environ))


def _list_known(options: Options, chosen: Chosen, earlier: EarlierRuns, known: tuple[Test, ...]) -> int:
    """List tests without an import."""
    selected = chosen.selection.tests(known, chosen.known_files)
    tests, _ = _in_shard(options, earlier, selected, ())
    tests, note = _to_rerun(options, earlier, chosen, tests)
    for warning in (*earlier.warnings, *note):
        print(f"warning: {warning}", file=sys.stderr)
    _list(Work(options, Plan((), tests), (), Inventory(), (), ()), earlier)
    return ExitCode.PASSED if tests else ExitCode.NOTHING_SELECTED


def _list(work: Work, earlier: EarlierRuns) -> None:
    from .report import listing

    if work.options.json:
        print(listing.as_json(work.plan.tests, work.broken, earlier.durations.expected))
    else:
        print("\n".join(listing.as_text(work.plan.tests, work.broken)))


def _dry_run(work: Work, site: RunSite, first: Priority) -> None:
    from .report import listing

    typical = typical_seconds(work.plan.units)
    queue, leases = site.schedule(work, first)
    starts = forecast(queue, leases, lambda unit: typical if unit.seconds is None else unit.seconds)
    print("\n".join(listing.schedule_as_text(list(starts))))


def _run(
    options: Options, root: Path, chosen: Chosen, earlier: EarlierRuns, affected: Affected, more: RunFollower | None
) -> int:
    """Runs the tests. Whatever ends the run, its reports have all results so far, and say what ended it."""
    from .engine.signals_and_keys import Deferred

    site: RunSite | None = None
    reporters: Reporters | None = None
    with ExitStack() as owner:
        commit = CommitQuery(root)
        try:
            owner.enter_context(commit)
            site = owner.enter_context(_open_site(options, root, chosen.files))
            reporters = _reporters(options, more)  # while the zygote imports torch
            work = find_work(options, chosen, earlier, site, reporters, affected)
            deferred = owner.enter_context(Deferred())  # from now on, all of this is done before a signal counts
        except UsageError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            deferred = owner.enter_context(Deferred())
            reporters = reporters or _reporters(options, more)
            warnings = _each_once(earlier.warnings, () if site is None else site.warnings)
            summary = _without_work(options, chosen.files, commit, error, reporters, warnings)
        else:
            summary = _run_work(work, site, earlier, commit, reporters, deferred, affected)
        reporters.on_event(RunEnded(summary))
        _print_errors(summary, reporters)
        if summary.interrupted:  # what is left only waits for processes to end: the next signal ends that
            deferred.reason = deferred.reason or "an earlier signal"
    code = exit_code(summary, options.allow_all_skipped)
    if options.affected and code is ExitCode.NOTHING_SELECTED:
        code = ExitCode.PASSED
    return exit_code_with(reporters, code)


def _reporters(options: Options, more: RunFollower | None) -> Reporters:
    from .report import make_reporters

    environ = {**os.environ, **(more.environ if more is not None else {})}
    made = make_reporters(options, sys.stdout, environ)
    return made if more is None else dataclasses.replace(made, reporters=[more, *made.reporters])


def _run_work(
    work: Work,
    site: RunSite,
    earlier: EarlierRuns,
    commit: CommitQuery,
    reporters: Reporters,
    deferred: Deferred,
    affected: Affected,
) -> Summary:
    header = make_header(commit, work.inventory, site.torch_version)
    engine, late = site.engine(work, _first(work, earlier), reporters, header)
    nothing = () if work.tests or work.options.affected else ("nothing is selected: no test matches",)
    warnings = _each_once(earlier.warnings, work.warnings, nothing, late)
    for warning in warnings:
        reporters.on_event(Warned(warning))
    summary = engine.run(work.plan, work.broken, lambda: deferred.reason)
    for lost in without_result(work.plan, summary):
        reporters.on_event(AttemptEnded(lost.last, retry=False))
        reporters.on_event(TestFinished(lost))
        summary = dataclasses.replace(summary, finished=(*summary.finished, lost))
    try:
        earlier.record(summary, (test.id for test in work.discovered))
        affected.record(site.reads(), work.discovered, (one.test.id for one in summary.finished))
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
            print(f"{user_commands.runner_name()}: {error}", file=sys.stderr)


def exit_code_with(reporters: Reporters, code: ExitCode) -> ExitCode:
    """The exit code of a run, which is not a success if a report raised an exception of ours."""
    red = code in (ExitCode.FAILED, ExitCode.INTERRUPTED)
    return code if red or not reporters.errors else ExitCode.OUR_ERROR
