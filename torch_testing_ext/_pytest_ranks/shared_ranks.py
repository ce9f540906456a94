"""Ranks that the tests of a class or module share, by `scope` in the mark: each test is a task of persistent ranks.

They are forked when the first of the tests is called, and dismissed with the last fixtures of the class or module. All
fixtures of these tests are set up in the ranks, where those of a wider scope outlive a test. A test that fails ends
the ranks; the next one has others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._cases.verdicts import RankError, print_leftovers
from torch_testing_ext.launch.job import Sanitize
from torch_testing_ext.launch.persistent_ranks import PersistentRanks
from torch_testing_ext.launch.rank_evidence import RankEvidence

from . import item_in_rank
from .marks import RankSpec, scope_node

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
