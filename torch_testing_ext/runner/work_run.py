"""The run of the work that was found, its reports and its exit code."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch_testing_ext._process import user_commands
from torch_testing_ext._process.words import each_once
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.missing_results import describe_undeclared, without_result
from torch_testing_ext.runner.scheduling.plan import priority
from torch_testing_ext.runner.scheduling.unit_queue import Priority, Queue

from . import aspects_of_run
from .chosen_files import Chosen
from .events import AttemptEnded, Collected, Reporter, Reporters, RunBegan, RunEnded, TestFinished, Warned
from .found_work import find_work
from .model import Attempt, ExitCode, FinishedTest, Policy, Summary, Test, TestEnd, TestId, exit_code
from .opened_site import site_of
from .options import CannotRun, Options, UsageError
from .run_header import CommitQuery, make_header
from .site_protocol import RunSite, Work

if TYPE_CHECKING:
    from torch_testing_ext.runner.engine.signals_and_keys import Deferred


class RunFollower(Reporter, Protocol):
    """Follows a run for another process."""

    # The variables of the terminal there.
    environ: Mapping[str, str]


def priority_of(work: Work, earlier: EarlierRuns) -> Priority:
    return priority(work.options)


def sign_of_life(policy: Policy) -> Reporter:
    """Shows on the terminal that files are imported, although stdout may be for a program."""
    from torch_testing_ext.runner.report import make_status
    from torch_testing_ext.runner.report.console_style import is_terminal
    from torch_testing_ext.runner.report.terminal_stream import TerminalStream

    if not is_terminal(sys.stderr, os.environ):
        return Reporters(())
    return make_status(TerminalStream(sys.stderr), policy)


def run_tests(
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
    work: Work | None = None
    with ExitStack() as owner:
        commit = CommitQuery(root)
        try:
            owner.enter_context(commit)
            site = owner.enter_context(site_of(options, root, chosen.files))
            # The preloaded server imports torch meanwhile.
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
            warnings = each_once(earlier.warnings, () if site is None else site.warnings)
            summary = _without_work(options, chosen.files, commit, error, reporters, warnings)
        else:
            summary = _run_work(work, site, earlier, commit, reporters, deferred, affected)
        reporters.on_event(RunEnded(summary))
        _print_errors(summary, reporters)
        if summary.interrupted and deferred.reason is None:
            # What is left only waits for processes to end: the next signal ends that.
            deferred.reason = "an earlier signal"
    code = exit_code(summary, options.allow_all_skipped)
    may_be_nothing = options.affected is not None or (work is not None and work.is_empty_shard)
    if may_be_nothing and code is ExitCode.NOTHING_SELECTED:
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
    queue = Queue(work.plan.units, leases, priority_of(work, earlier))
    prepared = site.prepare(work, queue, leases, reporters)
    engine = Engine(
        site, work.options, work.inventory, leases, queue, reporters, header, prepared.memory, prepared.others
    )
    nothing = []
    if work.is_empty_shard:
        nothing.append("this shard is empty: the others have all tests")
    elif not work.tests and work.options.affected is None:
        nothing.append("nothing is selected: no test matches")
    warnings = each_once(earlier.warnings, work.warnings, nothing, prepared.warnings)
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
    all_warnings = each_once(warnings, earlier.warnings, summary.warnings, site.warnings, last)
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
