"""The parent's side of a marked test: fixtures, forks, the common verdict of its ranks.

Fixtures that need nothing of ranks are set up here, and ranks inherit them. The fork server is forked off this
process for each test, when all of that has happened, and ends with the test.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.device_needs import for_backend
from torch_testing_ext._process import early_threads
from torch_testing_ext._process.devices_setting import CPU, default_devices
from torch_testing_ext._process.logs import cut_middle, text_of
from torch_testing_ext._process.terminal import UserTerminal
from torch_testing_ext._pytest_ranks import command_by_pytest, debugger_of_rank, item_in_rank
from torch_testing_ext._pytest_ranks.marks import (
    COMMAND,
    PLACE,
    SHOW_COMMAND,
    RankSpec,
    draw_for_all_ranks,
    plan_of_item,
    rank_side,
    scope_node,
)
from torch_testing_ext._pytest_ranks.pytest_internals import (
    captured_output,
    configuration,
    item_state,
)
from torch_testing_ext._testing.bases import invocation, launched_ranks, ranked_test_case
from torch_testing_ext._testing.bases.expected_imports import expected_imports
from torch_testing_ext._testing.bases.rank_verdicts import RankError, raise_verdict
from torch_testing_ext._testing.bases.world_ranks import WorldBody, WorldRanks, not_run, run_rank_of_world
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import kinds_on, may_differ
from torch_testing_ext._tests.launcher_variables import TORCHRUN
from torch_testing_ext.launch import session
from torch_testing_ext.launch.aspects.devices import FAKE
from torch_testing_ext.launch.aspects.output import STREAM
from torch_testing_ext.launch.aspects.world import SIZE
from torch_testing_ext.launch.attempts import DeviceNeed, Host, ProcessHost, RankAttempt, RanksEnd, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.kept_ranks import KeptRanks
from torch_testing_ext.launch.watching.evidence import RankEvidence

from .reports import LONGEST_SECTION

# Keeps these frames out of pytest's tracebacks.
__tracebackhide__ = True


def need_of_devices(config: Any, name: str, ranks: int) -> DeviceNeed:
    """The devices for these ranks of a test. If the folder of locks cannot be used, one of this session serves."""
    owner = f"pid {os.getpid()}: pytest, {name}"
    return DeviceNeed(ranks, owner=owner, other_folder=lambda: _folder_of_session(config))


def _folder_of_session(config: Any) -> Path:
    """Return a folder that all workers of pytest-xdist share."""
    base = configuration.temporary_base(config)
    is_worker = hasattr(config, "workerinput")
    shared = base.parent if is_worker else base
    return shared / "torch_testing_ext-leases"


def set_up(item: Any, spec: RankSpec) -> RankSpec:
    """Prepare the set-up of a test: skip it if there are too few devices, and leave out the fixtures of ranks.

    Returns its mark with the number of devices that it has here.
    """
    why = launched_ranks.wrong_size(spec.world_size)
    if why:
        raise item_state.skip_at_test(why)
    size = SIZE.value()
    if draw_for_all_ranks(item):
        from torch_testing_ext._collectives.worlds.world_views import not_in_world
        from torch_testing_ext._hypothesis import hypothesis_internals

        if size is not None:
            why = not_in_world(size, "draws examples, which its ranks agree on")
            raise item_state.skip_at_test(why)
        hypothesis_internals.allow_fixtures(item.function)
    if size is not None:
        # Its ranks do not communicate, and use no devices.
        spec = replace(spec, world_size=size, devices=0, is_auto=False)
    fake = FAKE.value()
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
        error = item_state.skip_at_test(f"{skip.message}{for_backend(spec.backend)}")
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
    try:
        return _where_ranks_run(folder)
    except ValueError as error:
        # Each test with ranks fails with the same.
        return f"ranks: {error}"


def _where_ranks_run(folder: Path) -> str:
    if default_devices(folder) == CPU:
        return "ranks: on the CPU with gloo, by the setting devices, unless the mark of a test says otherwise"
    fake = FAKE.value()
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
    host = MarkedRanks(item, spec) if spec.scope == "function" else SharedRanks(item, spec)
    if launch.this_launch() is None:
        debugger_of_rank.skip_verdicts(item.config)
    if launch.this_launch() is None and SIZE.value() is None:
        # Here, once: each rank would do it by itself.
        for name in (*expected_imports(str(item.path)), *launch.preload_hints()):
            importlib.import_module(name)
    verdict = session.run(host, _plan_of(item, spec))
    _raise(_name_of(item), verdict, host.xfails)


def _raise(name: str, verdict: launch.Verdict, xfails: Sequence[str | None]) -> None:
    """Raise the verdict on a test. `xfails`: of each rank that failed by itself, the reason if that was expected."""
    if verdict.outcome is launch.TestOutcome.SKIPPED:
        raise item_state.skip_at_test(verdict.message)
    has_failed = verdict.outcome in (launch.TestOutcome.FAILED, launch.TestOutcome.ERROR)
    if has_failed and xfails and None not in xfails:
        raise pytest.xfail.Exception(xfails[0] or "")
    raise_verdict(verdict, name)


def _plan_of(item: Any, spec: RankSpec) -> TestPlan:
    timeout = spec.timeout or item.config.getoption("rank_timeout", None) or ranked_test_case.TIMEOUT_DEFAULT
    return TestPlan(
        case_of_item(item),
        spec.world_size,
        timeout,
        launch.Expected(may_differ=may_differ(item.obj, item.cls)),
        kinds_on(item.obj, item.cls),
        plan_of_item(item),
        devices=need_of_devices(item.config, item.nodeid, spec.devices),
        folder=item.nodeid,
        is_whole_test=True,
        nodes=spec.nodes,
    )


class _OfItem(Host):
    """A host of a marked test."""

    def __init__(self, item: Any, spec: RankSpec):
        self.item = item
        self.spec = spec
        # Why each rank that failed by itself was expected to.
        self.xfails: list[str | None] = []

    def in_world(self, size: int) -> Host:
        if self.spec.scope != "function":
            raise not_run(size, f"shares its ranks with the other tests of its {self.spec.scope}")
        return MarkedWorld(self.item, replace(self.spec, world_size=size, devices=0, is_auto=False))

    def in_place(self) -> Host:
        return _MarkedInPlace(self)

    def refusal(self, what: str, why: str) -> Exception:
        return RankError(f"{what}: {why}")


class MarkedRanks(_OfItem, ProcessHost):
    """The ranks of one marked test, forked off pytest's process when the test is called."""

    kind = HostKind.INHERITING

    def start(self, attempt: RankAttempt) -> None:
        config = self.item.config
        rank = debugger_of_rank.rank_with_terminal(config, self.spec.world_size)
        attempt.is_endless = rank is not None
        self._debug_rank = rank
        terminal = captured_output.live_terminal(config)
        if terminal is not None:
            attempt.resources.callback(os.close, terminal)
        test = item_in_rank.RankTest(self.item, self.spec, debug_rank=rank, terminal=terminal)
        try:
            with _terminal_for(self.item, rank):
                self.begin(attempt, test)
        except launch.CannotStart as error:
            remedy = early_threads.explain_early_threads() or _REMEDIES
            raise RankError(str(error) if error.is_refused else f"{error}\n\n{remedy}") from None

    def begin(self, attempt: RankAttempt, test: item_in_rank.RankTest) -> None:
        """Start the ranks."""
        self.run = launch.launch_from_here(self.job(attempt, item_in_rank.run_in_rank), test)

    def job(self, attempt: RankAttempt, body: Callable[..., object]) -> launch.Job:
        """Make the job of ranks with what pytest's options say of their output."""
        item = self.item
        captures_nothing = item.config.getoption("capture", "no") == "no" and COMMAND not in item.stash
        return attempt.job(
            body,
            stream=STREAM.value() or captures_nothing,
            debug_rank=self._debug_rank,
            expects_stops=UserTerminal.here().expects_stops(str(item.path)),
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        try:
            yield
        except pytest.fail.Exception as error:
            # The signal of pytest-timeout raises this.
            raise RankError(f"{error}\n\n{_ENDED}") from None

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        return _without_output(super().watch(attempt))

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        """Add to the report of the test what its ranks have left. Of a sweep, that is the first run."""
        if not attempt.is_first:
            return end
        item = self.item
        extras = [item_in_rank.read_extras(report.account) for report in end.reports]
        _add_sections(item, attempt.directory, self.spec)
        item.user_properties.extend(extras[0].properties)
        if any(of_rank.has_quit for of_rank in extras):
            item.session.shouldstop = "you quit the debugger"
        pairs = zip(end.reports, extras, strict=True)
        self.xfails = [of_rank.xfail for report, of_rank in pairs if launch.failed_by_itself(report)]
        return end


class MarkedWorld(MarkedRanks, WorldRanks):
    """The ranks of one marked test in a whole world."""

    kind = HostKind.WORLD

    def __init__(self, item: Any, spec: RankSpec):
        MarkedRanks.__init__(self, item, spec)
        WorldRanks.__init__(self, WorldBody(item_in_rank.run_in_world))

    def begin(self, attempt: RankAttempt, test: item_in_rank.RankTest) -> None:
        self.body = replace(self.body, inherited=test)
        self.start_world(attempt, self.job(attempt, run_rank_of_world))


def _without_output(evidence: RankEvidence) -> RankEvidence:
    """The evidence without what ranks have printed, which is in sections of the report."""
    return replace(evidence, reports=tuple(replace(report, output="") for report in evidence.reports))


class SharedRanks(MarkedRanks):
    """The ranks of a class or module, in which a marked test is one task of several."""

    kind = HostKind.KEPT

    def begin(self, attempt: RankAttempt, test: item_in_rank.RankTest) -> None:
        self._kept = _kept_ranks(self.item, self.spec)
        if not self._kept.are_there:
            _dismiss(self._kept)
            self._kept.start(attempt.plan, lambda ground: self.job(ground, item_in_rank.run_shared), test)
        self._kept.begin(self.item.nodeid, attempt.sanitize)

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        """Run the test in them. Their output during the test, and its log, are then in files of the attempt."""
        evidence = self._kept.watch(attempt.timeout, attempt.expected)
        for report in evidence.reports:
            (attempt.directory / f"rank{report.rank}.log").write_text(self._kept.output(report.rank), "utf-8")
            with suppress(OSError):
                log = item_in_rank.log_file(self._kept.directory, report.rank)
                log.replace(item_in_rank.log_file(attempt.directory, report.rank))
        return _without_output(evidence)

    def release(self, attempt: RankAttempt) -> None:
        """Leave the ranks to the next test. They end with the fixtures of their class or module."""


_GROUPS: pytest.StashKey[dict[RankSpec, KeptRanks]] = pytest.StashKey()


def _kept_ranks(item: Any, spec: RankSpec) -> KeptRanks:
    """The ranks of a test, which are forked when it is called, and end with the fixtures of its class or module.

    All fixtures of such tests are set up in the ranks, where those of a wider scope outlive a test. A test that fails
    ends the ranks; the next one has others.
    """
    node = scope_node(item, spec)
    groups: dict[RankSpec, KeptRanks] = node.stash.setdefault(_GROUPS, {})
    if spec not in groups:
        groups[spec] = KeptRanks(node.nodeid)
        node.addfinalizer(lambda: _dismiss(groups.pop(spec)))
    return groups[spec]


def _dismiss(ranks: KeptRanks) -> None:
    """Let ranks tear their fixtures down and exit. Raises what goes wrong then."""
    message = ranks.dismiss()
    if message:
        raise RankError(message)


class _MarkedInPlace(launched_ranks.InPlace):
    """A marked test in this process, which a launcher has started as a rank."""

    def __init__(self, host: _OfItem):
        super().__init__(self._run)
        self._host = host

    def _run(self, context: launch.RankContext) -> None:
        item = self._host.item
        context.inherited = item_in_rank.RankTest(item, replace(self._host.spec, scope="function"))
        try:
            item_in_rank.run_in_place(item, context.account)
        finally:
            if not launched_ranks.is_first():
                _save_captured(item, context.directory / f"rank{context.rank}.log")

    def refusal(self, what: str, why: str) -> Exception:
        return RankError(f"{what}: {why}")

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        judged = launched_ranks.judged()
        # The others' files are here, too.
        if launched_ranks.is_first():
            _add_sections(self._host.item, self.directory, self._host.spec)
            self._host.item.user_properties.extend(item_in_rank.read_extras(judged.accounts[0]).properties)
        self._host.xfails = [item_in_rank.read_extras(judged.accounts[rank]).xfail for rank in judged.failed]
        return end


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
    capture = captured_output.capture_manager(item.config) if debug_rank is not None else None
    if capture is None:
        yield
        return
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


def case_of_item(item: Any) -> launch.Case:
    show_command = item.stash.get(SHOW_COMMAND, "")
    return invocation.case_of(_name_of(item), str(item.path), command_by_pytest.command(item), show_command)


def _name_of(item: Any) -> str:
    return item_state.name_in_file(item) or str(item.name)


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


def _save_captured(item: Any, file: Path) -> None:
    capture = captured_output.capture_manager(item.config)
    if capture is not None and capture.is_globally_capturing():
        with suppress(OSError):
            file.write_text("".join(capture.read_global_capture()), "utf-8", "replace")
