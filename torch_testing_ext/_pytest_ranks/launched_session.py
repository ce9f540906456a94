"""A session of pytest in each rank of a launcher: rank 0 reports for all, and the others only what it cannot know."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext.launch.member import Member

from . import pytest_internals


def configure(config: pytest.Config) -> None:
    """Allow one JUnit file, and no xdist, whose workers would all be the same rank. Called before other plugins."""
    where = launch.this_launch()
    if where is None:
        return
    if config.getoption("numprocesses", None) or os.environ.get("PYTEST_XDIST_WORKER"):
        raise pytest.UsageError(
            f"pytest-xdist cannot run under a launcher, which has started {where.world_size} ranks: run with -n 0"
        )
    config.pluginmanager.register(_Session(where.rank), "torch_testing_ext launched session")
    if where.rank > 0:
        config.option.xmlpath = None


class _Session:
    """The plugin that adapts a session to its rank."""

    def __init__(self, rank: int):
        self._rank = rank
        self._text = io.StringIO()
        self._is_known_to_rank_0 = True

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._silence(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._silence(session.config)

    def _silence(self, config: pytest.Config) -> None:
        if self._rank > 0:
            pytest_internals.redirect_terminal(config, self._text)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        if report.failed and not isinstance(getattr(error, "outcome", None), launch.Outcome):
            self._is_known_to_rank_0 = False
        if Member.is_ending():
            item.session.shouldstop = "the launcher has asked this process to end"
        return report

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._is_known_to_rank_0 = False

    def pytest_unconfigure(self) -> None:
        if self._rank > 0 and not self._is_known_to_rank_0:
            print(f"\npytest in rank {self._rank}:\n{self._text.getvalue()}", file=sys.stderr)
