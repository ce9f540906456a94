"""The parent's side of a marked test: leases, forks, shared ranks, the verdict."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._machine import accelerators
from torch_testing_ext._process import early_threads, user_commands
from torch_testing_ext._process.launcher_variables import TORCHRUN
from torch_testing_ext._process.logs import cut_middle, text_of
from torch_testing_ext._process.project_settings import CPU, default_devices
from torch_testing_ext._process.terminal import UserTerminal
from torch_testing_ext._testing.bases import groups_and_devices, invocation, launched_ranks, ranked_test_case
from torch_testing_ext._testing.bases.rank_verdicts import RankError, raise_verdict
from torch_testing_ext._testing.bases.tests_in_ranks import expected_imports, job_for_test
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import LAUNCHED, kinds_on, may_differ, say_not_drilled
from torch_testing_ext.faults import FaultPlan, Sweep
from torch_testing_ext.launch import environment
from torch_testing_ext.launch.aspects import rank_warnings
from torch_testing_ext.launch.aspects.output import print_leftovers
from torch_testing_ext.launch.aspects.sanitizer import sanitize_with
from torch_testing_ext.launch.in_rank import Sanitize
from torch_testing_ext.launch.persistent_ranks import PersistentRanks
from torch_testing_ext.launch.rank_watch import RankEvidence

from . import item_in_rank, pytest_internals
from .marks import COMMAND, PLACE, SHOW_COMMAND, RankSpec, plan_of_item, plan_of_run, rank_side, scope_node
from .reports import LONGEST_SECTION

# --------------------------------------------------------------------------------------------------------------------
# The accelerators of one test, which no other test has at the same time.


def leased_devices(
    config: Any, name: str, ranks: int, fake: Sequence[str] = ()
) -> AbstractContextManager[dict[str, str]]:
    """Lease devices for these ranks of a test. If the folder of locks cannot be used, one of this session serves."""
    owner = f"pid {os.getpid()}: pytest, {name}"
    return groups_and_devices.leased_devices(ranks, owner, lambda: _folder_of_session(config), fake)


def _folder_of_session(config: Any) -> Path:
    """Return a folder that all workers of pytest-xdist share."""
    base = pytest_internals.temporary_base(config)
    is_worker = hasattr(config, "workerinput")
    shared = base.parent if is_worker else base
    return shared / "torch_testing_ext-leases"


# --------------------------------------------------------------------------------------------------------------------
# Ranks that the tests of a class or module share, by `scope` in the mark: each test is a task of persistent ranks.
#
# They are forked when the first of the tests is called, and dismissed with the last fixtures of the class or module.
# All fixtures of these tests are set up in the ranks, where those of a wider scope outlive a test. A test that fails
# ends the ranks; the next one has others.

# Seconds for idle ranks to tear their fixtures down and exit.
LEAVE_TIMEOUT = 10.0

_GROUPS: pytest.StashKey[dict[RankSpec, SharedRanks]] = pytest.StashKey()


class SharedRanks:
    """The ranks of one class or module, for tests with equal marks."""

    def __init__(self, name: str):
        self.name = name
        self.directory = Path()
        self._ranks: PersistentRanks | None = None
        # Addresses and devices that the ranks have.
        self._resources = ExitStack()

    @classmethod
    def of(cls, item: Any, spec: RankSpec) -> SharedRanks:
        """The ranks of a test, which end with the fixtures of its class or module."""
        node = scope_node(item, spec)
        groups: dict[RankSpec, SharedRanks] = node.stash.setdefault(_GROUPS, {})
        if spec not in groups:
            groups[spec] = cls(node.nodeid)
            node.addfinalizer(lambda: groups.pop(spec).dismiss())
        return groups[spec]

    def start(self, make_job: Callable[[Path, ExitStack], launch.Job], test: item_in_rank.RankTest) -> None:
        """Start the ranks, if they are not there or not complete."""
        if self._ranks is not None and (self._ranks.is_over or not self._ranks.is_complete()):
            self.dismiss()
        if self._ranks is None:
            self.directory = launch.new_directory(self.name)
            try:
                self._ranks = PersistentRanks(make_job(self.directory, self._resources), test)
            except BaseException:
                self._discard()
                raise

    def run(
        self, item: Any, timeout: float | None, expected: launch.Expected, sanitize: Sanitize, directory: Path
    ) -> RankEvidence:
        """Run a test in them. Their output during the test, and its log, are then in files of the directory."""
        assert self._ranks is not None
        try:
            self._ranks.start(item.nodeid, sanitize)
            result = self._ranks.watch(timeout, expected)
        except BaseException:
            # Ctrl-C, or the signal of pytest-timeout.
            self._ranks.end()
            raise
        for report in result.reports:
            (directory / f"rank{report.rank}.log").write_text(self._ranks.output(report.rank), "utf-8")
            with suppress(OSError):
                log = item_in_rank.log_file(self.directory, report.rank)
                log.replace(item_in_rank.log_file(directory, report.rank))
        return result

    def dismiss(self) -> None:
        """Let the ranks tear their fixtures down and exit. Raises what goes wrong then."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        try:
            if ranks.is_over:
                return
            result = ranks.dismiss(LEAVE_TIMEOUT)
            name = f"{self.name} (after {ranks.last.rpartition('::')[2]})"
            print_leftovers(name, result.reports)
            message = result.verdict(launch.Case(name)).message
            if message:
                raise RankError(message)
        finally:
            self._discard()

    def _discard(self) -> None:
        self._resources.close()
        launch.discard(self.directory)


# --------------------------------------------------------------------------------------------------------------------
# The parent's side of a marked test: it forks the ranks when the test is called, and raises their common verdict.
#
# Fixtures that need nothing of ranks are set up here, and ranks inherit them. The fork server is forked off this
# process for each test, when all of that has happened, and ends with the test.

# Keeps these frames out of pytest's tracebacks.
__tracebackhide__ = True


def set_up(item: Any, spec: RankSpec) -> RankSpec:
    """Prepare the set-up of a test: skip it if there are too few devices, and leave out the fixtures of ranks.

    Returns its mark with the number of devices that it has here.
    """
    why = launched_ranks.wrong_size(spec.world_size)
    if why:
        raise pytest_internals.skip_at_test(why)
    settings = environment.read_settings()
    if settings.world is not None:
        # Its ranks do not communicate, and use no devices.
        spec = replace(spec, world_size=settings.world, devices=0, is_auto=False)
    fake = settings.fake_devices
    needed = spec.devices
    if spec.is_auto:
        launched = launch.this_launch()
        local = os.environ.get(TORCHRUN.local_world_size, "")
        here = None if launched is None else int(local) if local.isdecimal() else spec.world_size
        spec = spec.on(len(fake) or accelerators.most_ranks(), here)
        # The other ranks of a launch may be on other machines.
        needed = spec.devices if here is None else min(spec.devices, here)
    kind = "fake devices" if fake else accelerators.accelerator_type()
    item.stash[PLACE] = f"{spec.devices} {kind}" if spec.devices else CPU
    are_fake = needed <= len(fake)
    skip = None if are_fake else needs.devices(needed).unmet()
    if skip is not None:
        error = pytest_internals.skip_at_test(skip.message)
        error.want = needs.Skipped(skip).want
        raise error
    left_out = rank_side(item, None if launch.this_launch() else spec)
    names = tuple(sorted(left_out))
    item.stash[item_in_rank.LEFT_OUT] = names
    # pytest sets up what is not there yet.
    item.funcargs.update(dict.fromkeys(names))
    return spec


def where_ranks_run(folder: Path) -> str:
    """A line on the devices of tests whose marks do not say any."""
    if default_devices(folder) == CPU:
        return "ranks: on the CPU with gloo, by the setting devices, unless the mark of a test says otherwise"
    fake = environment.read_settings().fake_devices
    count = len(fake) or accelerators.device_count()
    most = len(fake) or accelerators.most_ranks()
    if not count:
        return "ranks: on the CPU with gloo, since there is no accelerator"
    kind = "fake" if fake else accelerators.accelerator_type()
    devices = f"{count} {kind} device" if count == 1 else f"{count} {kind} devices"
    if most > count:
        return f"ranks: on {devices}, which up to {most} ranks share; a test with more runs on the CPU with gloo"
    return f"ranks: on {devices}, one for each; a test with more ranks runs on the CPU with gloo"


def run_in_ranks(item: Any, spec: RankSpec) -> None:
    """Run a test in ranks; raise what it would raise without them, for all of them together."""
    if launch.this_launch() is not None:
        _run_in_place(item, spec)
        return
    chosen = environment.read_settings()
    if chosen.world is not None:
        _run_in_world(item, spec, chosen.world)
        return
    debug_rank = item_in_rank.rank_with_terminal(item.config, chosen.debug_rank, spec.world_size)
    chosen = replace(chosen, debug_rank=debug_rank)
    item_in_rank.skip_verdicts(item.config)
    # Here, once: each rank would do it by itself.
    for name in (*expected_imports(str(item.path)), *launch.preload_hints()):
        importlib.import_module(name)
    planned = plan_of_run(item, spec.world_size)
    if not isinstance(planned, Sweep):
        _, verdict, xfails = _run_shown(item, spec, chosen, planned)
        _raise(_name_of(item), verdict, xfails)
        return
    first = planned.recording
    xfails = []

    def run(plan: FaultPlan) -> tuple[Sequence[launch.RankReport], launch.Verdict]:
        if plan != first:
            return _run_with(item, spec, chosen, plan)
        reports, verdict, xfails[:] = _run_shown(item, spec, chosen, plan)
        return reports, verdict

    verdict = launch.sweep_verdict(planned, run)
    _raise(_name_of(item), verdict, xfails)


def _run_shown(
    item: Any, spec: RankSpec, chosen: environment.Settings, plan: FaultPlan | None
) -> tuple[Sequence[launch.RankReport], launch.Verdict, list[Any]]:
    """Run a test, and add what its ranks have left to its report. Returns also what `xfail` says where they failed."""
    directory = launch.new_directory(item.nodeid)
    try:
        reports, verdict = _run_and_judge(item, spec, directory, chosen, plan)
        extras = [item_in_rank.read_extras(report.account) for report in reports]
        _add_sections(item, directory, spec)
        item.user_properties.extend(extras[0].properties)
        rank_warnings.warn_again_of_ranks(reports)
        if any(of_rank.has_quit for of_rank in extras):
            item.session.shouldstop = "you quit the debugger"
    finally:
        launch.discard(directory)
    if verdict.outcome is launch.Outcome.PASSED:
        print_leftovers(_name_of(item), reports)
    xfails = []
    for report, of_rank in zip(reports, extras, strict=True):
        if launch.failed_by_itself(report):
            xfails.append(of_rank.xfail)
    return reports, verdict, xfails


def _run_in_world(item: Any, spec: RankSpec, size: int) -> None:
    """Run a test as each rank of a whole world, without communication."""
    from torch_testing_ext._testing.bases import tests_in_worlds

    if spec.scope != "function":
        raise tests_in_worlds.not_run(size, f"shares its ranks with the other tests of its {spec.scope}")
    if plan_of_item(item) is not None:
        raise tests_in_worlds.not_run(size, tests_in_worlds.HAS_FAULTS)
    test = item_in_rank.RankTest(item, spec)
    directory = launch.new_directory(item.nodeid)
    try:
        tests_in_worlds.run_in_world(item_in_rank.run_in_world, size, directory, test)
    finally:
        launch.discard(directory)


def _run_with(
    item: Any, spec: RankSpec, chosen: environment.Settings, plan: FaultPlan
) -> tuple[Sequence[launch.RankReport], launch.Verdict]:
    """Run a test with these faults of a sweep."""
    directory = launch.new_directory(item.nodeid)
    try:
        return _run_and_judge(item, spec, directory, chosen, plan)
    finally:
        launch.discard(directory, of_fault=True)


def _run_and_judge(
    item: Any, spec: RankSpec, directory: Path, chosen: environment.Settings, plan: FaultPlan | None
) -> tuple[Sequence[launch.RankReport], launch.Verdict]:
    """Run a test in new ranks, or in those that it shares. Returns their reports and the common verdict."""
    case = _case_of(item)
    expected = launch.Expected(may_differ=_may_differ(item))
    shared = SharedRanks.of(item, spec) if spec.scope != "function" else None
    with ExitStack() as resources:
        terminal = pytest_internals.live_terminal(item.config)
        if terminal is not None:
            resources.callback(os.close, terminal)
        test = item_in_rank.RankTest(item, spec, debug_rank=chosen.debug_rank, terminal=terminal)
        try:
            with _terminal_for(item, chosen.debug_rank):
                if shared is not None:
                    shared.start(functools.partial(_job, item, spec, chosen, None, item_in_rank.run_shared), test)
                else:
                    job = _job(item, spec, chosen, plan, item_in_rank.run_in_rank, directory, resources)
                    run = launch.launch_from_here(job, test)
        except launch.CannotStart as error:
            remedy = early_threads.explain_early_threads() or _REMEDIES
            raise RankError(str(error) if error.is_refused else f"{error}\n\n{remedy}") from None
        try:
            timeout = _timeout(item, spec, chosen)
            if shared is not None:
                result = shared.run(item, timeout, expected, _sanitize(item, plan), directory)
            else:
                result = launch.watch(run, timeout, expected)
        except pytest.fail.Exception as error:
            # The signal of pytest-timeout raises this.
            raise RankError(f"{error}\n\n{_ENDED}") from None
    # Their output is in sections of the report.
    reports = tuple(replace(report, output="") for report in result.reports)
    return reports, replace(result, reports=reports).verdict(case)


def _job(
    item: Any,
    spec: RankSpec,
    chosen: environment.Settings,
    plan: FaultPlan | None,
    body: Callable[..., object],
    directory: Path,
    resources: ExitStack,
) -> launch.Job:
    """Make the job of ranks. They have their addresses and devices as long as `resources` is open."""
    addresses = resources.enter_context(environment.leased_variables(spec.world_size))
    shown = resources.enter_context(leased_devices(item.config, item.nodeid, spec.devices, chosen.fake_devices))
    captures_nothing = item.config.getoption("capture", "no") == "no" and COMMAND not in item.stash
    return job_for_test(
        body,
        spec.world_size,
        directory,
        {**addresses, **shown},
        chosen,
        stream=chosen.stream or captures_nothing,
        sanitize=_sanitize(item, plan),
        expects_stops=UserTerminal.here().expects_stops(str(item.path)),
    )


def _may_differ(item: Any) -> bool:
    return may_differ(item.obj, item.cls)


def _sanitize(item: Any, plan: FaultPlan | None = None) -> Sanitize:
    return sanitize_with(kinds_on(item.obj, item.cls)).with_faults(plan)


_ENDED = (
    "The ranks have been ended. To see where each of them was, let the mark world_size have a timeout of its own that\n"
    "is shorter: @pytest.mark.world_size(2, timeout=60)"
)
_REMEDIES = (
    "A fixture or an earlier test of this process may have started the threads, or used an accelerator. Let such a\n"
    "fixture ask for dist_env, so that it is set up in the ranks; run such tests in another run of pytest; or use the\n"
    "test classes of torch_testing_ext.common_distributed, which do not inherit fixtures."
)


@contextmanager
def _terminal_for(item: Any, debug_rank: int | None) -> Iterator[None]:
    """Let the rank that is debugged inherit the terminal, and not the files into which pytest captures output."""
    capture = pytest_internals.capture_manager(item.config) if debug_rank is not None else None
    if capture is None:
        yield
        return
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


def _timeout(item: Any, spec: RankSpec, chosen: environment.Settings) -> float | None:
    if chosen.debug_rank is not None:
        return None
    given: float | None = item.config.getoption("rank_timeout", None)
    return spec.timeout or given or ranked_test_case.TIMEOUT_DEFAULT


def _case_of(item: Any) -> launch.Case:
    show_command = item.stash.get(SHOW_COMMAND, "")
    return invocation.case_of(_name_of(item), str(item.path), _command(item), show_command)


def _name_of(item: Any) -> str:
    return pytest_internals.name_in_file(item) or str(item.name)


def _command(item: Any) -> str:
    if COMMAND in item.stash:
        return str(item.stash[COMMAND])
    file = user_commands.relative(str(item.path))
    node = f"{file}::{pytest_internals.name_in_file(item)}"
    return user_commands.command("-m", "pytest", *invocation.pytest_arguments, node)


# -- the end


def _add_sections(item: Any, directory: Path, spec: RankSpec) -> None:
    """Add what each rank has printed and logged to the report of the test."""
    for rank in range(spec.world_size):
        files = {
            "stdout and stderr": directory / f"rank{rank}.log",
            "log": item_in_rank.log_file(directory, rank),
        }
        for kind, file in files.items():
            text = text_of(file)
            if text:
                item.add_report_section("call", f"{kind} of rank {rank}", cut_middle(text, LONGEST_SECTION))


def _raise(name: str, verdict: launch.Verdict, xfails: Sequence[str | None]) -> None:
    """Raise the verdict on a test. `xfails`: of each rank that failed by itself, the reason if that was expected."""
    if verdict.outcome is launch.Outcome.SKIPPED:
        raise pytest_internals.skip_at_test(verdict.message)
    has_failed = verdict.outcome in (launch.Outcome.FAILED, launch.Outcome.ERROR)
    if has_failed and xfails and None not in xfails:
        raise pytest.xfail.Exception(xfails[0] or "")
    raise_verdict(verdict, name)


# -- in the ranks of a launcher


def _run_in_place(item: Any, spec: RankSpec) -> None:
    """Run a test in this process, which a launcher has started as a rank; raise the verdict of all ranks."""
    say_not_drilled(LAUNCHED)
    if plan_of_item(item) is not None:
        raise RankError(f"faults: {LAUNCHED}")
    own = launch.new_directory(item.nodeid)
    case = _case_of(item)
    try:
        timeout = _timeout(item, spec, environment.read_settings())
        together = launched_ranks.begin(
            spec.world_size, case, own, timeout, may_differ=_may_differ(item), sanitize=_sanitize(item)
        )
        directory = Path(together.directory)

        def body(context: launch.RankContext) -> None:
            context.inherited = item_in_rank.RankTest(item, replace(spec, scope="function"))
            try:
                item_in_rank.run_in_place(item, context.account)
            finally:
                if not launched_ranks.is_first():
                    _save_captured(item, directory / f"rank{context.rank}.log")

        verdict = launched_ranks.run(together, body)
        judged = launched_ranks.judged()
        # The others' files are here, too.
        if launched_ranks.is_first():
            _add_sections(item, directory, spec)
            item.user_properties.extend(item_in_rank.read_extras(judged.accounts[0]).properties)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    failed = [item_in_rank.read_extras(judged.accounts[rank]) for rank in judged.failed]
    _raise(_name_of(item), verdict, [of_rank.xfail for of_rank in failed])


def _save_captured(item: Any, file: Path) -> None:
    capture = pytest_internals.capture_manager(item.config)
    if capture is not None and capture.is_globally_capturing():
        with suppress(OSError):
            file.write_text("".join(capture.read_global_capture()), "utf-8", "replace")
