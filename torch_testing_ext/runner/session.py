"""One run, from its options to its exit code: discover, select, plan, then list, forecast or run.

Misspelt names are reported before the modules that run and report tests are imported, which takes longer.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_testing_ext._machine.device_locks import DeviceLocks, UnsafeFolder, default_folder, leased_by_ancestors
from torch_testing_ext._machine.nvml import Gpu, NvmlError, may_have_nvidia_gpus, open_nvml
from torch_testing_ext._machine.sharing import RANKS_PER_GPU
from torch_testing_ext._machine.topology import matching, warnings_of
from torch_testing_ext._machine.visible_devices import problem_of_mask

from .events import AttemptEnded, Reporters, RunBegan, RunEnded, TestFinished, Warned
from .header import CommitQuery, make_header
from .model import Attempt, ExitCode, FinishedTest, RunHeader, Summary, Test, TestId, TestOutcome, exit_code
from .options.options import Action, CannotRun, Options, Rerun, UsageError
from .scheduling.durations import Durations, LastFailed
from .scheduling.forecast import forecast
from .scheduling.inventory import Inventory, all_mig_instances, make_inventory, notes_on_sharing, with_gpus
from .scheduling.leases import Leases
from .scheduling.node_leases import NodeLeases
from .scheduling.plan import Plan, plan, priority, shard, without_result
from .scheduling.policy import Queue, typical_seconds
from .scheduling.undeclared import describe_undeclared
from .selection.files import test_files
from .selection.selection import Selection

if TYPE_CHECKING:
    from .cluster.place import ClusterPlace
    from .engine.engine import Engine
    from .engine.memory_return import MemoryReturn
    from .engine.signals_and_keys import Deferred
    from .processes.file_processes import Discovery, FileProcesses


@dataclass(frozen=True)
class Work:
    """The result of discovery and planning, to run or to list."""

    plan: Plan
    broken: tuple[Attempt, ...]  # files that cannot be imported, and tests that cannot be run
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
        self._commit = CommitQuery(root)
        self._memory: MemoryReturn | None = None

    def run(self) -> int:
        """Does what the options say, and returns the exit code."""
        selection = Selection.of(self._options, self._root, self._cwd)
        known_files = test_files(self._options, self._root, self._cwd)
        files = selection.files(known_files)
        if self._options.action is Action.RUN:
            return self._run(selection, files, known_files)
        with self._zygote(files) as zygote:
            work = self._work(zygote, selection, files, known_files)
        return self._list(work) if self._options.action is Action.LIST else self._dry_run(work)

    def _zygote(self, files: Sequence[str]) -> FileProcesses | ClusterPlace:
        """What will run the tests of these files."""
        from .processes.file_processes import FileProcesses
        from .processes.warm_up import warm_up_for

        options = self._options
        if options.ranks_per_gpu > 1:
            os.environ[RANKS_PER_GPU] = str(options.ranks_per_gpu)  # the world size of a test may depend on it
        warm_up = warm_up_for(self._root, files)
        return FileProcesses(self._root, warm_up, drop_in=bool(options.drop_in), all_marks=bool(options.marks))

    # -- from names to work

    def _discover(self, zygote: Any, files: Sequence[str]) -> tuple[Inventory, Discovery]:
        """What there is to lease, and the tests."""
        kind, count = zygote.count_devices()
        seen = zygote.devices_seen
        gpus = self._ask_nvml(kind)
        known = (lambda name: _is_there(name, gpus)) if gpus else None
        if self._options.fake_gpus is None and (why := problem_of_mask(os.environ, kind, count, known)):
            raise UsageError(why)
        mig = all_mig_instances(os.environ, kind, gpus)
        inventory = make_inventory(
            self._options,
            os.environ,
            kind or ("cuda" if mig else None),
            max(count, len(mig)),
            seen.uuids,
            seen.facts,
            seen.nccl,
            mig,
        )
        inventory = with_gpus(inventory, gpus, os.environ)
        self._warnings.extend(warnings_of(inventory.gpus))
        self._warnings.extend(notes_on_sharing(inventory, seen.nccl))
        return inventory, zygote.discover(files, inventory.most_ranks, self._options.jobs)

    def _ask_nvml(self, kind: str | None) -> tuple[Gpu, ...]:
        """All GPUs of this machine, as NVML knows them; none if it cannot be asked, or need not be."""
        if kind not in (None, "cuda") or self._options.fake_gpus is not None or not may_have_nvidia_gpus():
            return ()
        try:
            nvml = open_nvml()
        except NvmlError as error:
            if "has not answered" in str(error):
                raise CannotRun(str(error)) from None
            return ()
        gpus = nvml.gpus()
        nvml.close()
        return gpus

    def _work(self, zygote: Any, selection: Selection, files: Sequence[str], known_files: Sequence[str]) -> Work:
        inventory, discovery = self._discover(zygote, files)
        self._warnings.extend(discovery.warnings)
        not_run = {attempt.test.id: attempt for attempt in discovery.not_run}
        known = (*discovery.tests, *(attempt.test for attempt in discovery.not_run))
        selected = selection.tests(known, known_files)
        broken = (*discovery.broken, *(not_run[test.id] for test in selected if test.id in not_run))
        tests, broken = self._in_shard([test for test in selected if test.id not in not_run], broken)
        repeat = self._options.repeat or 1
        planned = plan(self._to_rerun(tests), inventory, self._durations.expected, repeat)
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
        leases = self._leases(work, locks=False)
        starts = forecast(
            self._queue(work, leases), leases, lambda unit: typical if unit.seconds is None else unit.seconds
        )
        print("\n".join(listing.schedule_as_text(list(starts))))
        return _code_without_running(work)

    def _warn_on_stderr(self) -> None:
        """Programs may read the list on stdout."""
        for warning in self._warnings:
            print(f"warning: {warning}", file=sys.stderr)

    def _run(self, selection: Selection, files: Sequence[str], known_files: Sequence[str]) -> int:
        """Runs the tests. Whatever ends the run, its reports have all results so far, and say what ended it."""
        from .engine.signals_and_keys import Deferred

        reporters: Reporters | None = None
        with ExitStack() as owner:
            try:
                owner.enter_context(self._commit)
                zygote = owner.enter_context(self._zygote(files))
                reporters = self._reporters()  # while the zygote imports torch
                work = self._work(zygote, selection, files, known_files)
                deferred = owner.enter_context(Deferred())  # from now on, all of this is done before a signal counts
            except UsageError:
                raise
            except (Exception, KeyboardInterrupt) as error:
                deferred = owner.enter_context(Deferred())
                reporters = reporters or self._reporters()
                summary = self._without_work(files, error, reporters)
            else:
                summary = self._run_work(zygote, work, reporters, deferred)
            reporters.on_event(RunEnded(summary))
            _print_errors(summary, reporters)
        return exit_code_with(reporters, exit_code(summary, self._options.allow_all_skipped))

    def _reporters(self) -> Reporters:
        from .report import make_reporters

        return make_reporters(self._options, sys.stdout, os.environ)

    def _run_work(self, zygote: Any, work: Work, reporters: Reporters, deferred: Deferred) -> Summary:
        if not work.tests:
            self._warnings.append("nothing is selected: no test matches")
        leases = self._leases(work, locks=True)
        queue = self._queue(work, leases)
        header = make_header(self._commit, work.inventory, zygote.torch_version)
        self._memory = self._check_memory(zygote, work, reporters)
        for warning in self._warnings:
            reporters.on_event(Warned(warning))
        engine = self._engine(zygote, work, leases, queue, reporters, header)
        try:
            summary = engine.run(work.plan, work.broken, lambda: deferred.reason)
        finally:
            if self._memory is not None:
                self._memory.close()
        for lost in without_result(work.plan, summary):
            reporters.on_event(AttemptEnded(lost.last, retry=False))
            reporters.on_event(TestFinished(lost))
            summary = dataclasses.replace(summary, finished=(*summary.finished, lost))
        try:
            self._record(summary, work)
        except Exception:
            summary = dataclasses.replace(summary, error=summary.error or traceback.format_exc())
        undeclared = describe_undeclared(summary.finished) if work.inventory.names and not work.inventory.fake else None
        found = (*self._warnings, *summary.warnings, *zygote.warnings, *([undeclared] if undeclared else []))
        warnings = dict.fromkeys(found)
        return dataclasses.replace(summary, warnings=tuple(warnings))

    def _without_work(self, files: Sequence[str], error: BaseException, reporters: Reporters) -> Summary:
        """The summary of a run that ended before its tests were known: each file stands for its tests."""
        tests = tuple(Test(TestId(file)) for file in files)
        header = make_header(self._commit, Inventory(), "")
        reporters.on_event(RunBegan(tests, (), (), self._options.jobs, time.time(), header=header))
        if isinstance(error, KeyboardInterrupt):
            reporters.on_event(Warned("interrupted before the first test started"))
            return Summary((), 0.0, self._options.policy, interrupted=True, unfinished=tests)
        ours = not isinstance(error, CannotRun)
        why = "".join(traceback.format_exception(error)) if ours else str(error)
        finished = []
        for test in tests:
            attempt = Attempt(test, TestOutcome.ERROR, f"it was not run: {why.strip().splitlines()[-1 if ours else 0]}")
            finished.append(FinishedTest((attempt,)))
            reporters.on_event(AttemptEnded(attempt, retry=False))
            reporters.on_event(TestFinished(finished[-1]))
        return Summary(tuple(finished), 0.0, self._options.policy, warnings=tuple(self._warnings), error=why)

    def _engine(
        self, zygote: Any, work: Work, leases: Any, queue: Queue, reporters: Reporters, header: RunHeader
    ) -> Engine:
        from .engine.engine import Engine
        from .engine.place import LocalPlace

        place = LocalPlace(zygote, self._options, work.inventory, leases)
        return Engine(place, self._options, work.inventory, leases, queue, reporters, header, self._memory)

    def _check_memory(self, zygote: Any, work: Work, reporters: Reporters) -> MemoryReturn | None:
        """What checks that devices get their memory back after each test, if the driver can be asked."""
        from .engine.memory_return import MemoryReturn, uuids_for

        inventory = work.inventory
        is_local = inventory.kind == "cuda" and not inventory.fake and not inventory.nodes
        if not is_local or not any(unit.devices for unit in work.plan.units):
            return None
        try:
            nvml = open_nvml()
            uuids = uuids_for(inventory.identities, inventory.names, nvml.usage())
        except NvmlError as error:
            self._warnings.append(f"device memory is not checked between tests: {error}")
            return None
        return MemoryReturn(zygote.loop, nvml, uuids, lambda text: reporters.on_event(Warned(text)))

    def _queue(self, work: Work, leases: Any) -> Queue:
        return Queue(
            work.plan.units,
            len(work.inventory.names),
            self._options.jobs,
            priority(self._options, self._last_failed.failed),
            leases.may_run_now,
            leases if any(unit.of_devices for unit in work.plan.units) else None,
        )

    def _locks(self, work: Work) -> DeviceLocks | None:
        """What makes other runs leave this run its devices."""
        if not self._options.shared_leases or not any(unit.devices for unit in work.plan.units):
            return None
        try:
            return DeviceLocks(
                self._options.lease_folder or default_folder(),
                {name: work.inventory.identity_of(name) for name in work.inventory.names},
                f"pid {os.getpid()}: {shlex.join(sys.orig_argv)}",
                leased_by_ancestors(os.environ),
            )
        except (OSError, UnsafeFolder) as error:
            self._warnings.append(f"other runs may use the same devices at the same time: {error}")
            return None

    def _leases(self, work: Work, locks: bool) -> Leases | NodeLeases:
        """`locks`: whether other runs of this machine are to leave the devices to this one."""
        return Leases(
            work.inventory.names,
            self._options.jobs,
            self._locks(work) if locks else None,
            work.inventory.facts,
            work.inventory.shared_backend,
            work.inventory.gpus,
        )

    def _record(self, summary: Summary, work: Work) -> None:
        """A shard records no durations: that would change how the tests are split for the shards that run after it."""
        if self._options.shard is None:
            self._durations.record(summary.finished)
        self._last_failed.record(summary, work.discovered)


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


def _seed(options: Options) -> int | None:
    """A random seed if none is given, so that the report can name the seed of the order."""
    return random.randrange(2**32) if options.shuffle and options.seed is None else options.seed


def _discovered(discovery: Discovery) -> tuple[TestId, ...]:
    attempts = (*discovery.broken, *discovery.not_run)
    return (*(test.id for test in discovery.tests), *(attempt.test.id for attempt in attempts))


def _code_without_running(work: Work) -> int:
    if not work.tests:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.FAILED if work.broken else ExitCode.PASSED


def _is_there(name: str, gpus: Sequence[Gpu]) -> bool:
    return int(name) < len(gpus) if name.isdecimal() else bool(matching(name, gpus))
