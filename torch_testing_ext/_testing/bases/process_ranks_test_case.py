"""The common base of tests whose ranks are processes, fresh or shared.

The fork server of a test is forked before its setUp: ranks get the state that this process has then, not later. New
processes lack what setUp leaves in the parent, so ranks must lack it, too.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._testing.bases.expected_imports import expected_imports
from torch_testing_ext._testing.bases.invocation import command_of
from torch_testing_ext._testing.bases.rank_verdicts import Interrupted
from torch_testing_ext._testing.bases.ranked_test_case import PARENT, RankedTestCase
from torch_testing_ext._testing.helpers import expectations
from torch_testing_ext.launch.attempts import Host, RanksEnd
from torch_testing_ext.launch.session import Session

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


class ProcessRanksTestCase(RankedTestCase):
    """A test case whose ranks are processes of ours, or those of a launcher, in which the tests run in place."""

    MAIN_PROCESS_RANK = PARENT
    # A rank exits without destroying the gloo groups that it still has, which saves 10 ms a connection.
    fast_exit = True

    # The test's way through its ranks, from the end of setUp on.
    _session: Session | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A fork server that starts later finds the class by this.
        launch.Named.of(cls)

    @property
    def incarnation(self) -> int:
        """In a rank: how many processes of this rank have died by faults of the test before."""
        context = launch.current_context()
        return 0 if context is None else context.incarnation

    def _prepare_ranks(self) -> None:
        """Fork the server for the ranks of this test, unless it will start none."""
        # The error is raised again, and then shown, when setUp starts the ranks.
        with suppress(Exception):
            if self._has_own_ranks() and not self._is_rank() and not _skips_without_set_up(self):
                subject = launch.Named.of(type(self))
                launch.prepare(subject, expected_imports(subject.file or ""))

    def _open_session(self, host: Host, directory: Path | None = None) -> Session:
        """Make the session of this test. It is closed when the test is over, at the latest."""
        session = self._session = Session(host, self._plan(), directory)
        self.addCleanup(session.close)
        return session

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let Ctrl-C stop the run so that unittest still prints its summary."""
        try:
            yield
        except KeyboardInterrupt:
            # pytest has another type of result.
            if not isinstance(self._result, unittest.TestResult):
                raise
            self._result.stop()
            self._result.interrupted = True  # type: ignore[attr-defined]
            raise Interrupted(f"{self._short_name()} was interrupted; its ranks have been ended") from None

    def _with_expectations(self, end: RanksEnd, path: str, world_size: int) -> RanksEnd:
        """Fail ranks that disagree about an expectation; when accepting, rewrite the source."""
        logs = {rank: Path(f"{path}{expectations.SUFFIX}{rank}") for rank in range(world_size)}
        logs = {rank: log for rank, log in logs.items() if log.exists()}
        disagreement = expectations.compare_ranks(logs) if logs else ""
        if not disagreement:
            return end
        if end.verdict.outcome is launch.TestOutcome.PASSED:
            command = command_of(self, self._result)
            failure = FailureView.of_text(disagreement, rerun_command=command)
            return replace(end, verdict=launch.Verdict(launch.TestOutcome.FAILED, failure=failure))
        return end.with_note(disagreement)


def _skips_without_set_up(test: RankedTestCase) -> bool:
    method = getattr(test, test._testMethodName, None)
    if any(getattr(target, "__unittest_skip__", False) for target in (type(test), method)):
        return True
    try:
        return test._known_skip() is not None
    except AttributeError:
        # A need that reads what setUp has yet to set: it may skip.
        return True
    except Exception:
        return False
