"""--pdb and --trace for tests that run in ranks: one rank has the terminal, and its own debugger."""

from __future__ import annotations

from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._pytest_ranks.pytest_internals import failure_texts
from torch_testing_ext.launch.aspects.debugger import DEBUG_RANK, RANK


def rank_with_terminal(config: Any, world_size: int) -> int | None:
    """The rank that has the terminal, if any. --pdb and --trace need one."""
    chosen = config.getoption(RANK.field, None)
    if chosen is None:
        chosen = DEBUG_RANK.value()
    if chosen is None:
        needs_one = config.getoption("usepdb", False) or config.getoption("trace", False)
        chosen = 0 if needs_one else None
    if chosen is None or chosen >= world_size:
        return None
    return int(chosen)


def skip_verdicts(config: Any) -> None:
    """Let --pdb not stop in the parent at a verdict on ranks, whose processes have ended."""
    plugin = config.pluginmanager.get_plugin(failure_texts.DEBUGGER)
    if plugin is not None and not isinstance(plugin, _OnlyOutsideOfRanks):
        config.pluginmanager.unregister(plugin)
        config.pluginmanager.register(_OnlyOutsideOfRanks(plugin), failure_texts.DEBUGGER)


class _OnlyOutsideOfRanks:
    """The plugin for --pdb, but not for verdicts."""

    def __init__(self, plugin: Any):
        self._plugin = plugin

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if not isinstance(getattr(call.excinfo.value, "outcome", None), launch.TestOutcome):
            self._plugin.pytest_exception_interact(node, call, report)

    def pytest_internalerror(self, excinfo: Any) -> None:
        self._plugin.pytest_internalerror(excinfo)


def never_ask(config: Any) -> None:
    """Take the debugger of --trace out of a rank without the terminal."""
    plugin = config.pluginmanager.get_plugin(failure_texts.TRACE)
    if plugin is not None:
        config.pluginmanager.unregister(plugin)


def look_at(item: Any, error: BaseException) -> bool:
    """Let the user look at an error where it was raised, with --pdb and in the rank with the terminal.

    Returns whether the user has quit, which ends the session.
    """
    if not item.config.getoption("usepdb", False):
        return False
    excinfo = failure_texts.exception_info(error)
    call: Any = pytest.CallInfo.from_call(lambda: None, "call")
    call.excinfo = excinfo
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    if report.failed:
        try:
            failure_texts.enter_debugger(item, excinfo, report)
        except pytest.exit.Exception:
            return True
    return False
