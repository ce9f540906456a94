"""The way from names to work: the files, their tests, and those that are selected."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.words import each_once
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.load_as import FilesFound
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns
from torch_testing_ext.runner.scheduling.plan import plan
from torch_testing_ext.runner.scheduling.shards import shard

from . import aspects_of_run
from .chosen_files import Chosen
from .events import Reporter
from .loading import load_as_of
from .model import Attempt, OmittedTest, Test, TestEnd, TestId
from .options import CannotRun, Options, Rerun, UsageError
from .site_protocol import Found, RunSite, Work

if TYPE_CHECKING:
    from torch_testing_ext.runner.processes.file_processes import Discovery


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
    # pytest nearly always collects a file that is named, so its import need not wait for the answer.
    likely = chosen.files if options.names and len(chosen.files) == 1 and chosen.affected is None else ()
    files = files or site.find_files(importing=likely)
    failures = [failure for failure in files.failures if chosen.may_be_in(failure[0])]
    chosen = chosen.among(files)
    affected.record_files(load_as_of(options, chosen.root), site.reads(), chosen.known_files, is_whole=files.is_whole)
    chosen = narrowed_choice(options, chosen, earlier)
    work = _planned(options, chosen, earlier, site, reporter, affected)
    broken = [
        Attempt(Test(TestId(folder)), TestEnd(TestOutcome.ERROR, failure=FailureView.of_text(why)))
        for folder, why in failures
    ]
    work = dataclasses.replace(work, broken=(*work.broken, *broken))
    if files.failure and not work.broken:
        raise CannotRun(files.failure)
    return work


def narrowed_choice(options: Options, chosen: Chosen, earlier: EarlierRuns) -> Chosen:
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
    tests, in_shard = part_of_shard(options, earlier, selected, broken)
    to_run, note = tests_to_rerun(options, earlier, chosen, tests)
    if note and chosen.more_files:
        everything = dataclasses.replace(chosen, files=chosen.more_files, more_files=())
        return _planned(options, everything, earlier, site, reporter, affected)
    has_failed = None
    if options.rerun is Rerun.LAST_FAILED and not note:
        has_failed = earlier.last_failed.has_failures
    failing, unneeded = _broken_files(chosen, has_failed, in_shard)
    to_run = chosen.selection.without_disabled(to_run, found.inventory.kind)
    new, said = _new(options, earlier, to_run)
    planned = plan(to_run, found.inventory, earlier.durations.expected, options.repetitions, new, options.repeat_new)
    remarks = aspects_of_run.remarks(options, [str(test.id) for test in discovered])
    gone = chosen.selection.gone(discovered, chosen.known_files)
    warnings = each_once(found.warnings, site.warnings, discovery.warnings, unneeded, note, said, remarks, gone)
    left_out = _left_out(options, chosen, decisions, tests, to_run)
    is_empty = options.shard is not None and bool(selected or broken) and not (tests or in_shard)
    return Work(options, planned, failing, found.inventory, discovered, warnings, left_out, is_empty)


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


def part_of_shard(
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


def tests_to_rerun(
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
        passed = passed_before(options.rerun_of)
        before, tests = tests, tuple(test for test in tests if test.id not in passed)
        if before and not tests:
            return (), (f"each of the selected tests passed in {options.rerun_of}",)
    if options.rerun is not Rerun.LAST_FAILED:
        return tests, ()
    failed = tuple(test for test in tests if earlier.last_failed.failed(test.id))
    if failed:
        return failed, ()
    return tests, ("none of the selected tests failed in its last run: running all of them",)


def _new(options: Options, earlier: EarlierRuns, tests: Sequence[Test]) -> tuple[frozenset[TestId], tuple[str, ...]]:
    """With --repeat-new, the tests that no known run has. Where none is known, none is new, and a warning says so."""
    if not options.repeat_new:
        return frozenset(), ()
    if earlier.know_nothing:
        return frozenset(), ("--repeat-new: no run is known here, so no test counts as new",)
    return frozenset(test.id for test in tests if test.skip is None and not earlier.know(test.id)), ()


@functools.cache
def passed_before(path: Path) -> frozenset[TestId]:
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
