"""A session of pytest in each rank of a launcher: rank 0 reports for all, and whoever is left if it is gone."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._process import terminal
from torch_testing_ext._process.words import list_of
from torch_testing_ext._testing.bases.rank_verdicts import raise_verdict
from torch_testing_ext.launch.launched import peers
from torch_testing_ext.launch.launched.meeting import WrongRound
from torch_testing_ext.launch.launched.member import Member

from .pytest_internals import captured_output, configuration

# Seconds that ranks wait for each other at the end of their sessions, whose tests without the mark take their own time.
_LONGEST_WAIT = 120.0
# If a test does not return.
_SHORTEST_WAIT = 2.0


def configure(config: pytest.Config) -> None:
    """Allow no xdist, whose workers would all be the same rank. Called before other plugins."""
    where = launch.this_launch()
    if where is None:
        return
    why = launch.why_no_rank()
    if why:
        # The variables are somebody else's: tests in ranks fail, and say so. The others run.
        if config.getoption("numprocesses", None):
            os.environ[peers.NO_RANK] = terminal.to_variable(why)
            config.add_cleanup(_forget_no_rank)
        return
    if config.getoption("numprocesses", None) or os.environ.get("PYTEST_XDIST_WORKER"):
        raise pytest.UsageError(
            f"pytest-xdist cannot run under a launcher, which has started {where.world_size} ranks: run with -n 0"
        )
    session = _FirstSession() if where.rank == 0 else _OtherSession(where.rank, config)
    config.pluginmanager.register(session, "torch_testing_ext launched session")


def _forget_no_rank() -> None:
    os.environ.pop(peers.NO_RANK, None)


class _LaunchedSession:
    """The plugin that adapts a session to its rank."""

    def __init__(self) -> None:
        # The current test.
        self._item: Any = None
        self._session: Any = None
        # Reports, of tests that other ranks may have passed.
        self._failures: list[Any] = []
        self._longest_wait = _LONGEST_WAIT
        Member.report_end = self._end_now

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        self._item = item

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        outcome = getattr(error, "outcome", None)
        report.is_of_all_ranks = isinstance(outcome, launch.TestOutcome)
        if Member.is_ending():
            item.session.shouldstop = "the launcher has asked this process to end"
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not getattr(report, "is_of_all_ranks", False):
            self._failures.append(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._failures.append(report)

    def pytest_unconfigure(self) -> None:
        Member.report_end = None

    def _end_now(self, verdict: launch.Verdict) -> None:
        """Report a test that does not return, and end the session, in another thread than that which hangs in it."""
        self._longest_wait = _SHORTEST_WAIT
        item, config = self._item, self._session.config
        capture = captured_output.capture_manager(config)
        if capture is not None:
            capture.suspend(in_=True)
        call = pytest.CallInfo.from_call(lambda: raise_verdict(verdict, item.nodeid), "call")
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
        self._session.exitstatus = pytest.ExitCode.TESTS_FAILED
        configuration.finish_without_tear_down(self._session)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()


class _FirstSession(_LaunchedSession):
    """The session of rank 0, which reports for all ranks."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Report the failures that only other ranks have had, before any report is written."""
        try:
            failures = Member.of_this_process().hear(self._longest_wait)
        except WrongRound:
            return
        known = {(report.nodeid, report.when) for report in self._failures}
        for merged in _merged(session.config, failures):
            report = merged.report
            if (report.nodeid, report.when) in known:
                continue
            report.is_of_all_ranks = True
            report.nodeid += f" [{list_of(merged.ranks)}]"
            if isinstance(report, pytest.CollectReport):
                session.config.hook.pytest_collectreport(report=report)
            else:
                session.config.hook.pytest_runtest_logreport(report=report)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED


@dataclass
class _MergedReport:
    """The report of a test that has failed in some ranks."""

    # The report of the first of these ranks.
    report: Any
    ranks: list[int] = field(default_factory=list)


def _merged(config: Any, failures: Mapping[int, tuple[str, ...]]) -> list[_MergedReport]:
    """The reports of other ranks, those of one test once, with the ranks that have sent it."""
    merged: dict[tuple[str, str | None], _MergedReport] = {}
    for rank, texts in sorted(failures.items()):
        for text in texts:
            report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(text))
            key = (report.nodeid, report.when)
            if key not in merged:
                merged[key] = _MergedReport(report)
            merged[key].ranks.append(rank)
    return list(merged.values())


class _OtherSession(_LaunchedSession):
    """The session of another rank: it writes nothing, but keeps all for the case that rank 0 is gone at the end."""

    def __init__(self, rank: int, config: Any):
        super().__init__()
        self._rank = rank
        self._text = io.StringIO()
        self._has_reported = False
        self._junit = config.getoption("xmlpath", None)
        if self._junit:
            self._junit = Path(self._junit).absolute()
            # It has no name that would be left if this process is killed.
            self._kept = tempfile.TemporaryFile()  # noqa: SIM115
            config.option.xmlpath = f"/dev/fd/{self._kept.fileno()}"

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        captured_output.redirect_terminal(config, self._text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        super().pytest_sessionstart(session)
        captured_output.redirect_terminal(session.config, self._text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        hook = session.config.hook
        texts = []
        for report in self._failures:
            data = hook.pytest_report_to_serializable(config=session.config, report=report)
            texts.append(json.dumps(data, default=str))
        with suppress(WrongRound):
            self._has_reported = Member.of_this_process().tell(tuple(texts), self._longest_wait)

    def pytest_unconfigure(self) -> None:
        super().pytest_unconfigure()
        if not self._has_reported and (self._failures or Member.lacks_rank_0()):
            print(f"\npytest in rank {self._rank}:\n{self._text.getvalue()}", file=sys.stderr)
        self._write_junit_without_rank_0()

    def _end_now(self, verdict: launch.Verdict) -> None:
        super()._end_now(verdict)
        self._write_junit_without_rank_0()

    def _write_junit_without_rank_0(self) -> None:
        """Write the file of JUnit if rank 0 cannot write it."""
        if not self._junit:
            return
        if Member.lacks_rank_0() and not self._has_reported:
            with suppress(OSError):
                self._junit.parent.mkdir(parents=True, exist_ok=True)
                self._kept.seek(0)
                self._junit.write_bytes(self._kept.read())
