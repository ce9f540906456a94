"""One run, from its options to its exit code.

Each step is a function of the results of those before: `Options` -> `Chosen` -> `Work` -> `Summary`. Misspelt names
are reported before the modules that run and report tests are imported, which takes longer.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import suppress
from pathlib import Path

from torch_testing_ext.launch.aspects.lanes import PERFETTO
from torch_testing_ext.runner.load_as import FilesFound
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns
from torch_testing_ext.runner.scheduling.selection import Selection
from torch_testing_ext.runner.warm.warm_client import stop_servers

from . import aspects_of_run
from .chosen_files import Chosen
from .found_work import narrowed_choice, passed_before
from .listed_work import list_known, list_or_forecast
from .loading import load_as_of
from .model import ExitCode, Test, TestId
from .opened_site import is_of_ray
from .options import Action, Options, Shuffle, UsageError, Warm
from .work_run import RunFollower, run_tests


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
    if options.rerun_of is not None:
        # An error in it is reported before anything is imported.
        passed_before(options.rerun_of)
    sends = options.cluster is not None and is_of_ray(options.cluster) and options.cluster_root is None
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
        chosen = narrowed_choice(options, chosen, earlier)
        reports = (options.junitxml, options.html, options.value(PERFETTO), options.results)
        if not chosen.files and chosen.affected and options.action is Action.RUN and not any(reports):
            print("no test is affected: no file that the selected tests read has changed")
            return ExitCode.PASSED
        known = affected.unchanged_tests(chosen.files) if options.action.lists else None
        if known is not None:
            return list_known(options, chosen, earlier, known)
    if options.action is Action.RUN:
        return run_tests(options, root, chosen, earlier, affected, more)
    return list_or_forecast(options, root, chosen, earlier, affected)


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
