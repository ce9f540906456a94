"""Lists and forecasts of the work of a run, which run nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns
from torch_testing_ext.runner.scheduling.forecasts import forecast
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.plan import Plan
from torch_testing_ext.runner.scheduling.unit_queue import Priority, Queue, typical_seconds

from .chosen_files import Chosen
from .events import RunEnded
from .found_work import find_work, narrowed_choice, part_of_shard, tests_to_rerun
from .model import ExitCode, Summary, Test, Unit
from .opened_site import site_of
from .options import Action, Options
from .site_protocol import RunSite, Work
from .work_run import priority_of, sign_of_life


def list_or_forecast(
    options: Options,
    root: Path,
    chosen: Chosen,
    earlier: EarlierRuns,
    affected: Affected,
) -> int:
    """Find the tests, and print what would run."""
    sign = sign_of_life(options.policy)
    with site_of(options, root, chosen.files) as site:
        files = site.find_files() if options.by_pytest else None
        if options.action.lists and files is not None and files.is_whole:
            narrowed = narrowed_choice(options, chosen.among(files), earlier)
            known = affected.unchanged_tests(narrowed.files)
            if known is not None:
                sign.on_event(RunEnded(Summary((), 0.0, options.policy)))
                return list_known(options, narrowed, earlier, known)
        work = find_work(options, chosen, earlier, site, sign, affected, files)
    sign.on_event(RunEnded(Summary((), 0.0, options.policy)))
    for warning in (*earlier.warnings, *work.warnings):
        # Programs may read the list on stdout.
        print(f"warning: {warning}", file=sys.stderr)
    if options.action.lists:
        _list(work, earlier)
    else:
        _dry_run(work, site, priority_of(work, earlier))
    if not work.tests:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.FAILED if work.broken else ExitCode.PASSED


def list_known(options: Options, chosen: Chosen, earlier: EarlierRuns, known: tuple[Test, ...]) -> int:
    """List tests without an import."""
    selected = chosen.selection.tests(known, chosen.known_files)
    tests, _ = part_of_shard(options, earlier, selected, ())
    tests, note = tests_to_rerun(options, earlier, chosen, tests)
    tests = chosen.selection.without_disabled(tests, None)
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
    print("\n".join(listing.schedule_as_text(spans, work.plan.skipped)))
