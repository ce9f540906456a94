"""One run, from its options to its exit code.

Each step is a function of the results of those before: `Options` -> `Chosen` -> `Work` -> `Summary`. Misspelt names
are reported before the modules that run and report tests are imported, which takes longer.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.aspects.lanes import PERFETTO
from torch_testing_ext.runner.load_as import FilesFound
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.disabled_tests import stale, without_disabled
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns
from torch_testing_ext.runner.scheduling.finding_files import NOWHERE, all_files, relative_to, test_files
from torch_testing_ext.runner.scheduling.forecasts import forecast
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.missing_results import describe_undeclared, without_result
from torch_testing_ext.runner.scheduling.plan import Plan, plan, priority
from torch_testing_ext.runner.scheduling.selection import Selection
from torch_testing_ext.runner.scheduling.shards import shard
from torch_testing_ext.runner.scheduling.unit_queue import Priority, Queue, typical_seconds
from torch_testing_ext.runner.warm.warm_client import stop_servers

from . import aspects_of_run, doors
from .events import AttemptEnded, Collected, Reporter, Reporters, RunBegan, RunEnded, TestFinished, Warned
from .loading import load_as_of
from .model import Attempt, ExitCode, FinishedTest, OmittedTest, Policy, Summary, Test, TestEnd, TestId, Unit, exit_code
from .options import Action, CannotRun, Options, Rerun, Shuffle, UsageError, Warm
from .site_protocol import Found, OpenSite, RunSite, Work

if TYPE_CHECKING:
    from torch_testing_ext.runner.engine.signals_and_keys import Deferred
    from torch_testing_ext.runner.processes.file_processes import Discovery
from .run_header import CommitQuery, make_header

# pyproject.toml declares the same.
OWN_SITES = {
    "ray": "torch_testing_ext.runner.cluster.cluster_site:on_ray",
    "slurm": "torch_testing_ext.runner.cluster.cluster_site:on_slurm",
}


@dataclass(frozen=True)
class Chosen:
    """The files that the user chose by names, and the selection of their tests."""

    selection: Selection
    files: tuple[str, ...]
    known_files: Sequence[str]
    root: Path
    # The files to import if the tests that failed no longer exist.
    more_files: tuple[str, ...] = ()
    # Which decides, too.
    affected: Affected | None = None

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Chosen:
        """The choice by the names of files alone, before pytest has said which it has. Raises UsageError."""
        selection = Selection.of(options, root, cwd)
        program = os.path.realpath(sys.argv[0])
        known = tuple(file for file in test_files(options, root, cwd) if os.path.realpath(root / file) != program)
        if not options.by_pytest:
            if not known and not options.names:
                raise UsageError(NOWHERE.format(root=root))
            return cls(selection, selection.files(known), known, root)
        try:
            return cls(selection, selection.files(known), known, root)
        except UsageError:
            everything = tuple(all_files(root))
            with suppress(UsageError):
                selection.files(everything)
                return cls(selection, (), known, root)
            raise

    def may_be_in(self, folder: str) -> bool:
        """Whether chosen files may be in a folder, by their names alone."""
        return not self.selection.included or any(PurePath(file).is_relative_to(folder) for file in self.files)

    def among(self, files: FilesFound) -> Chosen:
        """The choice among the files that pytest has. Raises UsageError."""
        # The program itself has a name like one: run_test.py.
        program = os.path.realpath(sys.argv[0])
        paths = [self.root / path for path in files.paths if os.path.realpath(self.root / path) != program]
        known = tuple(sorted({relative_to(self.root, path) for path in paths}))
        if files.failure:
            known = tuple(self.known_files)
        if not known and not files.failures:
            raise UsageError(files.failure or NOWHERE.format(root=self.root))
        return dataclasses.replace(self, files=self.selection.files(known), known_files=known)


class RunFollower(Reporter, Protocol):
    """Follows a run for another process."""

    # The variables of the terminal there.
    environ: Mapping[str, str]


def run(options: Options, root: Path, more: RunFollower | None = None) -> int:
    """Does what the options say, and returns the exit code. `more`: gets the events, too."""
    if options.warm is Warm.NEVER:
        # Before anything else: a list of known tests, or an error, needs no process that imports them.
        stop_servers(root)
    if options.action is Action.RUN:
        aspects_of_run.require(options)
    if options.shuffle is Shuffle.RANDOM:
        # The report names the seed of the order.
        options = dataclasses.replace(options, shuffle=random.randrange(2**32))
    chosen = Chosen.of(options, root, Path.cwd())
    sends = options.cluster is not None and _is_of_ray(options.cluster) and options.cluster_root is None
    if options.action is Action.DRY_RUN and sends:
        from torch_testing_ext.runner.cluster.cluster_site import shipment

        print(shipment(root, chosen.files).describe())
        return ExitCode.PASSED
    earlier = EarlierRuns(options)
    affected = Affected(options, root, earlier)
    if options.why:
        return _explain(options, chosen, affected)
    if options.affected is not None:
        chosen = dataclasses.replace(chosen, affected=affected)
    files = affected.unchanged_files(load_as_of(options, root)) if options.by_pytest else chosen.known_files
    if files is not None:
        if options.by_pytest:
            chosen = chosen.among(FilesFound(tuple(files)))
        chosen = _narrowed(options, chosen, earlier)
        reports = (options.junitxml, options.html, options.value(PERFETTO), options.results)
        if not chosen.files and chosen.affected and options.action is Action.RUN and not any(reports):
            print("no test is affected: no file that the selected tests read has changed")
            return ExitCode.PASSED
        known = affected.unchanged_tests(chosen.files) if options.action.lists else None
        if known is not None:
            return _list_known(options, chosen, earlier, known)
    if options.action is Action.RUN:
        return _run(options, root, chosen, earlier, affected, more)
    return _list_or_forecast(options, root, chosen, earlier, affected)


def _list_or_forecast(
    options: Options,
    root: Path,
    chosen: Chosen,
    earlier: EarlierRuns,
    affected: Affected,
) -> int:
    """Find the tests, and print what would run."""
    sign = _sign_of_life(options.policy)
    with _open_site(options, root, chosen.files) as site:
        files = site.find_files() if options.by_pytest else None
        if options.action.lists and files is not None and files.is_whole:
            narrowed = _narrowed(options, chosen.among(files), earlier)
            known = affected.unchanged_tests(narrowed.files)
            if known is not None:
                sign.on_event(RunEnded(Summary((), 0.0, options.policy)))
                return _list_known(options, narrowed, earlier, known)
        work = find_work(options, chosen, earlier, site, sign, affected, files)
    sign.on_event(RunEnded(Summary((), 0.0, options.policy)))
    for warning in (*earlier.warnings, *work.warnings):
        # Programs may read the list on stdout.
        print(f"warning: {warning}", file=sys.stderr)
    if options.action.lists:
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
        tests = affected.known_tests(file) or ()
        with suppress(UsageError):
            tests = wanted.tests(tests, chosen.known_files)
        if not tests:
            # The file stands for them.
            tests = (Test(TestId(file)),)
        print("\n".join(affected.explain(file, tests)))
    return ExitCode.PASSED


def _is_of_ray(cluster: str) -> bool:
    """Whether the value of --cluster is the address of a Ray cluster, and not the name of a site."""
    return cluster == "auto" or not cluster.isidentifier()


def _open_site(options: Options, root: Path, files: Sequence[str]) -> AbstractContextManager[RunSite]:
    if options.cluster is None:
        from .run_site import on_this_machine

        return on_this_machine(options, root, files)
    sites = doors.entries(doors.SITES, OWN_SITES)
    of_ray = sites.pop("ray")
    entry = of_ray if _is_of_ray(options.cluster) else sites.get(options.cluster)
    if entry is None:
        raise UsageError(f"--cluster {options.cluster} is not auto, {', '.join(sites)}, HOST:PORT or ray://HOST:PORT")
    try:
        open_site: OpenSite = entry.load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise CannotRun(f"--cluster {options.cluster}: {entry.value} could not be loaded: {why}") from error
    return open_site(options, root, files)


def _first(work: Work, earlier: EarlierRuns) -> Priority:
    return priority(work.options)


# -- from names to work


def find_work(
    options: Options,
    chosen: Chosen,
    earlier: EarlierRuns,
    site: RunSite,
    reporter: Reporter,
    affected: Affected,
    files: FilesFound | None = None,
) -> Work:
    """Find the files, import those that are chosen, and plan the tests that are selected."""
    if not options.by_pytest:
        return _planned(options, chosen, earlier, site, reporter, affected)
    files = files or site.find_files()
    failures = [failure for failure in files.failures if chosen.may_be_in(failure[0])]
    chosen = chosen.among(files)
    affected.record_files(load_as_of(options, chosen.root), site.reads(), chosen.known_files, is_whole=files.is_whole)
    chosen = _narrowed(options, chosen, earlier)
    work = _planned(options, chosen, earlier, site, reporter, affected)
    broken = [
        Attempt(Test(TestId(folder)), TestEnd(TestOutcome.ERROR, failure=FailureView.of_text(why)))
        for folder, why in failures
    ]
    work = dataclasses.replace(work, broken=(*work.broken, *broken))
    if files.failure and not work.broken:
        raise CannotRun(files.failure)
    return work


def _narrowed(options: Options, chosen: Chosen, earlier: EarlierRuns) -> Chosen:
    """The choice, as earlier runs narrow it."""
    affected = chosen.affected
    if affected is not None:
        chosen = dataclasses.replace(chosen, files=tuple(file for file in chosen.files if affected.file_is(file)))
    if options.rerun is Rerun.LAST_FAILED:
        chosen = _with_failures(options, chosen, earlier)
    return chosen


def _planned(
    options: Options,
    chosen: Chosen,
    earlier: EarlierRuns,
    site: RunSite,
    reporter: Reporter,
    affected: Affected,
) -> Work:
    """Import the files, and plan the tests that are selected."""
    found = site.discover(chosen.files, reporter)
    discovery = found.discovery
    discovered = _discovered(found)
    affected.record(site.reads(), discovered)
    options = dataclasses.replace(options, jobs=found.slots)
    not_run = [attempt.test for attempt in discovery.not_run]
    decisions = list(chosen.selection.decisions((*discovery.tests, *not_run), chosen.known_files))
    selected, broken = _selected(decisions, discovery)
    selected = aspects_of_run.tests_with(options, selected)
    tests, in_shard = _in_shard(options, earlier, selected, broken)
    to_run, note = _to_rerun(options, earlier, chosen, tests)
    if note and chosen.more_files:
        everything = dataclasses.replace(chosen, files=chosen.more_files, more_files=())
        return _planned(options, everything, earlier, site, reporter, affected)
    has_failed = None
    if options.rerun is Rerun.LAST_FAILED and not note:
        has_failed = earlier.last_failed.has_failures
    failing, unneeded = _broken_files(chosen, has_failed, in_shard)
    disabled = chosen.selection.disabled
    to_run = without_disabled(to_run, disabled, found.inventory.kind)
    planned = plan(to_run, found.inventory, earlier.durations.expected, options.repetitions)
    remarks = aspects_of_run.remarks(options, [str(test.id) for test in discovered])
    gone = stale(disabled, discovered, chosen.known_files)
    warnings = _each_once(found.warnings, site.warnings, discovery.warnings, unneeded, note, remarks, gone)
    left_out = _left_out(options, chosen, decisions, tests, to_run)
    return Work(options, planned, failing, found.inventory, discovered, warnings, left_out)


def _left_out(
    options: Options,
    chosen: Chosen,
    decisions: Iterable[tuple[Test, str]],
    in_shard: Sequence[Test],
    to_run: Sequence[Test],
) -> tuple[OmittedTest, ...]:
    """The tests that do not run, and the files that are not imported, each with the option that leaves it out."""
    values = {
        "by name": (*options.names, *options.include),
        "--exclude": options.exclude,
        "--deselect": options.deselect,
        "-k": options.keyword,
        "-m": options.marks,
    }

    def shown(why: str) -> str:
        return f"{why} {shlex.join(values[why])}"

    stays = {test.id for test in in_shard}
    runs = {test.id for test in to_run}
    part = options.shard
    left_out = []
    for test, why in decisions:
        if why:
            why = shown(why)
        elif part is not None and test.id not in stays:
            why = f"--shard {part.index}/{part.count}"
        elif test.id not in runs:
            why = _by_earlier_runs(options, chosen)
        if why:
            left_out.append(OmittedTest(test.id, why, test.line, test.marks))
    imported = set(chosen.files)
    by_name = "by name" if values["by name"] else "--exclude"
    for file in chosen.known_files:
        if file not in imported:
            by_earlier_runs = chosen.affected or options.rerun is Rerun.LAST_FAILED
            left_out.append(OmittedTest(TestId(file), "by earlier runs" if by_earlier_runs else shown(by_name)))
    return tuple(left_out)


def _by_earlier_runs(options: Options, chosen: Chosen) -> str:
    """The option that chooses tests by the results of earlier runs, or of another."""
    if options.rerun_of is not None:
        return f"--rerun {options.rerun_of}"
    return f"--affected {options.affected}" if chosen.affected else "--last-failed"


def _selected(decisions: Iterable[tuple[Test, str]], discovery: Discovery) -> tuple[list[Test], list[Attempt]]:
    """The selected tests that can run; and the broken files, with the selected tests that cannot."""
    not_run = {attempt.test.id: attempt for attempt in discovery.not_run}
    tests = []
    broken = list(discovery.broken)
    for test, why in decisions:
        if why:
            continue
        if test.id in not_run:
            broken.append(not_run[test.id])
        else:
            tests.append(test)
    return tests, broken


def _broken_files(
    chosen: Chosen,
    has_failed: Callable[[str], bool] | None,
    broken: Iterable[Attempt],
) -> tuple[tuple[Attempt, ...], tuple[str, ...]]:
    """The files that may have selected tests, and a warning for each of the others. `has_failed`: only such files."""

    def may_have_selected(file: str) -> bool:
        if has_failed is not None and not has_failed(file):
            return False
        return chosen.selection.may_select_from(file, text_of(chosen.root / file))

    failing = []
    warnings = []
    for attempt in broken:
        file = attempt.test.id.file
        if attempt.test.id.method or may_have_selected(file):
            failing.append(attempt)
        else:
            warnings.append(f"{file} cannot be imported; none of its tests seems to be selected: {attempt.title}")
    return tuple(failing), tuple(warnings)


def _with_failures(options: Options, chosen: Chosen, earlier: EarlierRuns) -> Chosen:
    """For --last-failed: first of all the files with tests that failed, unless the selection is of single tests."""
    names_tests = any("::" in name for name in (*options.names, *options.include))
    if options.keyword or options.marks or names_tests or options.shard is not None:
        return chosen
    files = tuple(file for file in chosen.files if earlier.last_failed.has_failures(file))
    if not files:
        return chosen
    return dataclasses.replace(chosen, files=files, more_files=chosen.files)


def _in_shard(
    options: Options,
    earlier: EarlierRuns,
    tests: Sequence[Test],
    broken: Sequence[Attempt],
) -> tuple[tuple[Test, ...], tuple[Attempt, ...]]:
    """The tests and broken files of this shard. A broken file counts as a test, so exactly one shard reports it."""
    part = options.shard
    if part is None:
        return tuple(tests), tuple(broken)
    everything = (*tests, *(attempt.test for attempt in broken))
    kept = {test.id for test in shard(everything, part, earlier.durations.expected)}
    kept_tests = tuple(test for test in tests if test.id in kept)
    kept_broken = tuple(attempt for attempt in broken if attempt.test.id in kept)
    return kept_tests, kept_broken


def _to_rerun(
    options: Options,
    earlier: EarlierRuns,
    chosen: Chosen,
    tests: tuple[Test, ...],
) -> tuple[tuple[Test, ...], tuple[str, ...]]:
    """With --affected, the affected tests; with --rerun, those that did not pass there.

    With --last-failed, those that failed; all, and a warning, if none did.
    """
    affected = chosen.affected
    if affected is not None:
        tests = tuple(test for test in tests if affected.why(test.id) is not None)
    if options.rerun_of is not None:
        passed = _passed_in(options.rerun_of)
        before, tests = tests, tuple(test for test in tests if test.id not in passed)
        if before and not tests:
            return (), (f"each of the selected tests passed in {options.rerun_of}",)
    if options.rerun is not Rerun.LAST_FAILED:
        return tests, ()
    failed = tuple(test for test in tests if earlier.last_failed.failed(test.id))
    if failed:
        return failed, ()
    return tests, ("none of the selected tests failed in its last run: running all of them",)


def _passed_in(path: Path) -> frozenset[TestId]:
    """The tests that ran and passed in a run file. Raises UsageError."""
    from torch_testing_ext.runner.run_files.reading import results_of_file
    from torch_testing_ext.runner.run_files.results import passed_in
    from torch_testing_ext.runner.run_files.run_file import BadResults, is_run_file, read_run_file

    try:
        if not is_run_file(path):
            raise UsageError(f"--rerun: {path} is not a file that --run-file has written")
        runs = list(results_of_file(read_run_file(path)))
    except (OSError, BadResults) as error:
        raise UsageError(f"--rerun: {error}") from None
    return passed_in(runs)


def _discovered(found: Found) -> tuple[Test, ...]:
    tests = plan(found.discovery.tests, found.inventory, lambda test: None).tests
    cannot_run = [attempt.test for attempt in (*found.discovery.broken, *found.discovery.not_run)]
    return (*tests, *cannot_run)


def _each_once(*groups: Iterable[str]) -> tuple[str, ...]:
    unique: dict[str, None] = {}
    for warnings in groups:
        unique.update(dict.fromkeys(warnings))
    return tuple(unique)


# -- what to do with it


def _sign_of_life(policy: Policy) -> Reporter:
    """Shows on the terminal that files are imported, although stdout may be for a program."""
    from torch_testing_ext.runner.report import make_status
    from torch_testing_ext.runner.report.console_style import is_terminal
    from torch_testing_ext.runner.report.terminal_stream import TerminalStream

    if not is_terminal(sys.stderr, os.environ):
        return Reporters(())
    return make_status(TerminalStream(sys.stderr), policy)


def _list_known(options: Options, chosen: Chosen, earlier: EarlierRuns, known: tuple[Test, ...]) -> int:
    """List tests without an import."""
    selected = chosen.selection.tests(known, chosen.known_files)
    tests, _ = _in_shard(options, earlier, selected, ())
    tests, note = _to_rerun(options, earlier, chosen, tests)
    tests = without_disabled(tests, chosen.selection.disabled, None)
    for warning in (*earlier.warnings, *note):
        print(f"warning: {warning}", file=sys.stderr)
    _list(Work(options, Plan((), tests), (), Inventory(), (), ()), earlier)
    return ExitCode.PASSED if tests else ExitCode.NOTHING_SELECTED


def _list(work: Work, earlier: EarlierRuns) -> None:
    from torch_testing_ext.runner.report import listing

    if work.options.action is Action.LIST_AS_JSON:
        print(listing.as_json(work.plan.tests, work.broken, earlier.durations.expected))
    else:
        print("\n".join(listing.as_text(work.plan.tests, work.broken)))


def _dry_run(work: Work, site: RunSite, first: Priority) -> None:
    from torch_testing_ext.runner.report import listing

    typical = typical_seconds(work.plan.units)

    def seconds_of(unit: Unit) -> float:
        return typical if unit.seconds is None else unit.seconds

    leases = site.leases(work)
    queue = Queue(work.plan.units, leases, first)
    spans = list(forecast(queue, leases, seconds_of))
    print("\n".join(listing.schedule_as_text(spans)))


def _run(
    options: Options,
    root: Path,
    chosen: Chosen,
    earlier: EarlierRuns,
    affected: Affected,
    more: RunFollower | None,
) -> int:
    """Runs the tests. Whatever ends the run, its reports have all results so far, and say what ended it."""
    from torch_testing_ext.runner.engine.signals_and_keys import Deferred

    site: RunSite | None = None
    reporters: Reporters | None = None
    with ExitStack() as owner:
        commit = CommitQuery(root)
        try:
            owner.enter_context(commit)
            site = owner.enter_context(_open_site(options, root, chosen.files))
            # While the preloaded server imports torch.
            reporters = _reporters(options, more)
            work = find_work(options, chosen, earlier, site, reporters, affected)
            # From now on, all of this is done before a signal counts.
            deferred = owner.enter_context(Deferred())
        except UsageError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            deferred = owner.enter_context(Deferred())
            if reporters is None:
                reporters = _reporters(options, more)
            warnings = _each_once(earlier.warnings, () if site is None else site.warnings)
            summary = _without_work(options, chosen.files, commit, error, reporters, warnings)
        else:
            summary = _run_work(work, site, earlier, commit, reporters, deferred, affected)
        reporters.on_event(RunEnded(summary))
        _print_errors(summary, reporters)
        if summary.interrupted and deferred.reason is None:
            # What is left only waits for processes to end: the next signal ends that.
            deferred.reason = "an earlier signal"
    code = exit_code(summary, options.allow_all_skipped)
    if options.affected is not None and code is ExitCode.NOTHING_SELECTED:
        code = ExitCode.PASSED
    return exit_code_with(reporters, code)


def _reporters(options: Options, more: RunFollower | None) -> Reporters:
    from torch_testing_ext.runner.report import make_reporters

    if more is None:
        return make_reporters(options, sys.stdout, os.environ)
    made = make_reporters(options, sys.stdout, {**os.environ, **more.environ})
    return dataclasses.replace(made, reporters=[more, *made.reporters])


def _run_work(
    work: Work,
    site: RunSite,
    earlier: EarlierRuns,
    commit: CommitQuery,
    reporters: Reporters,
    deferred: Deferred,
    affected: Affected,
) -> Summary:
    """Run the work with the engine, and record its results for later runs."""
    from torch_testing_ext.runner.engine.engine import Engine

    header = make_header(commit, work.inventory, site.torch_version, aspects_of_run.facts(work.options))
    leases = site.leases(work)
    queue = Queue(work.plan.units, leases, _first(work, earlier))
    prepared = site.prepare(work, queue, leases, reporters)
    engine = Engine(
        site, work.options, work.inventory, leases, queue, reporters, header, prepared.memory, prepared.others
    )
    nothing = []
    if not work.tests and work.options.affected is None:
        nothing.append("nothing is selected: no test matches")
    warnings = _each_once(earlier.warnings, work.warnings, nothing, prepared.warnings)
    reporters.on_event(Collected(work.left_out))
    for warning in warnings:
        reporters.on_event(Warned(warning))
    summary = engine.run(work.plan, work.broken, lambda: deferred.reason)
    for lost in without_result(work.plan, summary):
        reporters.on_event(AttemptEnded(lost.last, retry=False))
        reporters.on_event(TestFinished(lost))
        summary = dataclasses.replace(summary, finished=(*summary.finished, lost))
    try:
        earlier.record(summary, (test.id for test in work.discovered))
        finished = [result.test.id for result in summary.finished]
        affected.record(site.reads(), work.discovered, finished)
    except Exception:
        summary = dataclasses.replace(summary, error=summary.error or traceback.format_exc())
    undeclared = None
    if work.inventory.names and not work.inventory.fake:
        undeclared = describe_undeclared(summary.finished)
    last = [] if undeclared is None else [undeclared]
    all_warnings = _each_once(warnings, earlier.warnings, summary.warnings, site.warnings, last)
    return dataclasses.replace(summary, warnings=all_warnings)


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
    # The slots of a cluster are not known.
    slots = options.jobs if options.cluster is None else 1
    header = make_header(commit, Inventory(), "")
    reporters.on_event(RunBegan(tests, (), (), slots, time.time(), header=header))
    if isinstance(error, KeyboardInterrupt):
        reporters.on_event(Warned("interrupted before the first test started"))
        return Summary((), 0.0, options.policy, interrupted=True, unfinished=tests)
    if isinstance(error, CannotRun):
        why = str(error)
        title = why.strip().splitlines()[0]
    else:
        why = "".join(traceback.format_exception(error))
        title = why.strip().splitlines()[-1]
    finished = []
    for test in tests:
        attempt = Attempt(test, TestEnd(TestOutcome.ERROR, f"it was not run: {title}"))
        result = FinishedTest((attempt,))
        finished.append(result)
        reporters.on_event(AttemptEnded(attempt, retry=False))
        reporters.on_event(TestFinished(result))
    return Summary(tuple(finished), 0.0, options.policy, warnings=warnings, error=why)


def _print_errors(summary: Summary, reporters: Reporters) -> None:
    """Errors of ours, which the console may be unable to print."""
    errors = [summary.error] if summary.error else []
    errors += [f"internal error in a report; this is not a test failure:\n{error}" for error in reporters.errors]
    with suppress(OSError, ValueError):
        for error in errors:
            print(f"{user_commands.runner_name()}: {error}", file=sys.stderr)


def exit_code_with(reporters: Reporters, code: ExitCode) -> ExitCode:
    """The exit code of a run, which is not a success if a report raised an exception of ours."""
    if reporters.errors and code not in (ExitCode.FAILED, ExitCode.INTERRUPTED):
        return ExitCode.OUR_ERROR
    return code
