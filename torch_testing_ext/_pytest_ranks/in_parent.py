"""The parent's side of a marked test: it forks the ranks when the test is called, and raises their common verdict.

Fixtures that need nothing of ranks are set up here, and ranks inherit them. The fork server is forked off this process
for each test, when all of that has happened, and ends with the test.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._cases import invocation, launched_ranks, passed_warnings, rank_environment, ranked
from torch_testing_ext._cases.jobs import job_for_test
from torch_testing_ext._cases.process_case import expected_imports
from torch_testing_ext._cases.rank_checks import sanitize_with
from torch_testing_ext._cases.verdicts import RankError, print_leftovers, raise_verdict
from torch_testing_ext._marks import needs
from torch_testing_ext._marks.settings_of_tests import kinds_on, may_differ
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.logs import cut_middle, text_of
from torch_testing_ext._process.user_terminal import UserTerminal
from torch_testing_ext.launch import settings
from torch_testing_ext.launch.job import Sanitize

from . import debugging, device_leases, item_in_rank, pytest_internals
from .marks import COMMAND, SHOW_COMMAND, RankSpec, rank_side
from .reports import LONGEST_SECTION
from .shared_ranks import SharedRanks

# Keeps these frames out of pytest's tracebacks.
__tracebackhide__ = True


def set_up(item: Any, spec: RankSpec) -> None:
    """Prepare the set-up of a test: skip it if there are too few devices, and leave out the fixtures of ranks."""
    why = launched_ranks.wrong_size(spec.world_size) if launch.this_launch() is not None else ""
    if why:
        raise pytest_internals.skip_at_test(why)
    are_fake = spec.devices <= len(settings.read().fake_devices)
    skip = None if are_fake else needs.devices(spec.devices).unmet()
    if skip is not None:
        error = pytest_internals.skip_at_test(skip.message)
        error.want = needs.Skipped(skip).want
        raise error
    left_out = rank_side(item, None if launch.this_launch() else spec)
    names = tuple(sorted(left_out))
    item.stash[item_in_rank.LEFT_OUT] = names
    # pytest sets up what is not there yet.
    item.funcargs.update(dict.fromkeys(names))


def run(item: Any, spec: RankSpec) -> None:
    """Run a test in ranks; raise what it would raise without them, for all of them together."""
    if launch.this_launch() is not None:
        _run_in_place(item, spec)
        return
    chosen = settings.read()
    debug_rank = debugging.rank_of(item.config, chosen.debug_rank, spec.world_size)
    chosen = replace(chosen, debug_rank=debug_rank)
    debugging.skip_verdicts(item.config)
    # Here, once: each rank would do it by itself.
    for name in (*expected_imports(str(item.path)), *launch.preload_hints()):
        importlib.import_module(name)
    directory = launch.new_directory(item.nodeid)
    try:
        reports, verdict = _run_and_judge(item, spec, directory, chosen)
        extras = [item_in_rank.read_extras(report) for report in reports]
        _add_sections(item, directory, spec)
        item.user_properties.extend(extras[0].properties)
        passed_warnings.warn_again(reports)
        if any(of_rank.has_quit for of_rank in extras):
            item.session.shouldstop = "the user has quit the debugger"
    finally:
        launch.discard(directory)
    if verdict.outcome is launch.Outcome.PASSED:
        print_leftovers(_name_of(item), reports)
    xfails = []
    for report, of_rank in zip(reports, extras, strict=True):
        if launch.failed_by_itself(report):
            xfails.append(of_rank.xfail)
    _raise(_name_of(item), verdict, xfails)


def _run_and_judge(
    item: Any, spec: RankSpec, directory: Path, chosen: settings.Settings
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
                    shared.start(functools.partial(_job, item, spec, chosen, item_in_rank.run_shared), test)
                else:
                    job = _job(item, spec, chosen, item_in_rank.run, directory, resources)
                    run = launch.launch_from_here(job, test)
        except launch.CannotStart as error:
            raise RankError(f"{error}\n\n{_REMEDIES}") from None
        try:
            timeout = _timeout(item, spec, chosen)
            if shared is not None:
                result = shared.run(item, timeout, expected, _sanitize(item), directory)
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
    chosen: settings.Settings,
    body: Callable[..., object],
    directory: Path,
    resources: ExitStack,
) -> launch.Job:
    """Make the job of ranks. They have their addresses and devices as long as `resources` is open."""
    addresses = resources.enter_context(rank_environment.leased(spec.world_size))
    shown = resources.enter_context(device_leases.leased(item, spec.devices, chosen.fake_devices))
    captures_nothing = item.config.getoption("capture", "no") == "no" and COMMAND not in item.stash
    return job_for_test(
        body,
        spec.world_size,
        directory,
        {**addresses, **shown},
        chosen,
        stream=chosen.stream or captures_nothing,
        sanitize=_sanitize(item),
        expects_stops=UserTerminal.here().expects_stops(str(item.path)),
    )


def _may_differ(item: Any) -> bool:
    return may_differ(item.obj, item.cls)


def _sanitize(item: Any) -> Sanitize:
    return sanitize_with(kinds_on(item.obj, item.cls))


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


def _timeout(item: Any, spec: RankSpec, chosen: settings.Settings) -> float | None:
    if chosen.debug_rank is not None:
        return None
    given: float | None = item.config.getoption("dist_timeout", None)
    return spec.timeout or given or ranked.TIMEOUT_DEFAULT


def _case_of(item: Any) -> launch.Case:
    show_command = item.stash.get(SHOW_COMMAND, "")
    return invocation.case_of(_name_of(item), str(item.path), _command(item), show_command)


def _name_of(item: Any) -> str:
    return str(item.nodeid.partition("::")[2] or item.name)


def _command(item: Any) -> str:
    if COMMAND in item.stash:
        return str(item.stash[COMMAND])
    file = str(item.path)
    with suppress(ValueError):
        file = os.path.relpath(file)
    node = f"{file}::{item.nodeid.partition('::')[2]}"
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
    own = launch.new_directory(item.nodeid)
    case = _case_of(item)
    try:
        timeout = _timeout(item, spec, settings.read())
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
