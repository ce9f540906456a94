"""The common base of tests whose ranks are processes, fresh or persistent.

The fork server of a test is forked before its setUp: ranks get the state that this process has then, not later. New
processes lack what setUp leaves in the parent, so ranks must lack it, too.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_testing_ext import launch
from torch_testing_ext._asserts import expectations
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._torch.process_state import DYNAMO, INDUCTOR
from torch_testing_ext.launch import settings

from . import launched_ranks, rank_environment
from .invocation import command_of
from .jobs import job_for_test
from .ranked import PARENT, RankedTestCase
from .source_facts import facts_of
from .verdicts import Interrupted

if TYPE_CHECKING:
    from torch_testing_ext.launch.rounds import Round

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


class ProcessRanksTestCase(RankedTestCase):
    """A test case whose ranks are processes of ours, or those of a launcher, in which the tests run in place."""

    MAIN_PROCESS_RANK = PARENT
    # A rank exits without destroying the gloo groups that it still has, which saves 10 ms a connection.
    fast_exit = True

    # In the ranks of a launcher.
    _round: Round | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A fork server that starts later finds the class by this.
        launch.Named.of(cls)

    def _prepare_ranks(self) -> None:
        """Fork the server for the ranks of this test, unless it will start none."""
        # The error is raised again, and then shown, when setUp starts the ranks.
        with suppress(Exception):
            if launch.this_launch() is None and not self._is_rank() and not _skips_without_set_up(self):
                subject = launch.Named.of(type(self))
                launch.prepare(subject, expected_imports(subject.file or ""))

    @classmethod
    def _job(
        cls, body: Callable[..., None], world_size: int, directory: Path, add_cleanup: Callable[..., Any], **others: Any
    ) -> launch.Job:
        """Make the job of the ranks. Their ports are leased until the clean-up."""
        lease = rank_environment.leased(world_size, keep=True)
        addresses = lease.__enter__()
        add_cleanup(lease.__exit__, None, None, None)
        return job_for_test(body, world_size, directory, addresses, settings.read(), cls, **others)

    def _begin_round(self, world_size: int, directory: Path) -> Round:
        """Begin the test in a process that a launcher has started as a rank, together with the others."""
        may_differ, sanitize = self._collectives_may_differ(), self._sanitize()
        return launched_ranks.begin(world_size, self._case(), directory, self._timeout(), self, may_differ, sanitize)

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

    def _with_expectations(self, verdict: launch.Verdict, path: str, world_size: int) -> launch.Verdict:
        """Fail ranks that disagree about an expectation; when accepting, rewrite the source."""
        disagreement = expectations.compare_ranks(path, world_size)
        if not disagreement:
            return verdict
        if verdict.outcome is launch.Outcome.PASSED:
            command = command_of(self, self._result)
            failure = FailureView.of_text(disagreement, rerun_command=command)
            return launch.Verdict(launch.Outcome.FAILED, failure=failure)
        return verdict.with_note(disagreement)


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


@functools.cache
def expected_imports(file: str) -> tuple[str, ...]:
    """Return the modules that the ranks of a test file will import by themselves, told by the names in the file.

    Without this, each rank of the first test imports them, which takes seconds, and the fork server once more.
    """
    facts = facts_of(file)
    if not facts.dynamo:
        return ()
    return (DYNAMO, INDUCTOR) if facts.inductor else (DYNAMO,)
