"""The begin and the end of the sanitizer in a rank that is a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch_testing_ext import fault_points
from torch_testing_ext._torch.groups import collective_errors
from torch_testing_ext._torch.operations import backend_calls, operation_hook, watched_stores, watched_waits
from torch_testing_ext.faults import FaultPlan

from .call_recorder import CallRecorder
from .faults_of_rank import FaultsOfRank
from .operation_checks import Check, Delays, NanCheck, Poison
from .replica_check import ReplicaCheck
from .result_samples import ResultSampler
from .sanitizer_kinds import SanitizeKind
from .sanitizer_log import LogWriter
from .watched_works import WaitCheck


class RecorderError(RuntimeError):
    """The sanitizer itself has failed; what it has not seen is unknown."""


class RankSanitizer:
    """The sanitizer of this rank: a recorder, its log and its checks, which another test replaces."""

    def __init__(
        self,
        rank: int,
        kinds: frozenset[SanitizeKind],
        delays: int | None,
        path: Path,
        plan: FaultPlan | None,
        wait_for_peers: Callable[[], None],
    ):
        self._log = LogWriter(path)
        self._checks: list[Check] = []
        if delays is not None:
            self._checks.append(Delays(delays, rank))
        if SanitizeKind.NAN in kinds:
            self._checks.append(NanCheck(self._note))
        if SanitizeKind.POISON in kinds:
            self._checks.append(Poison(rank))
        self._watches_uses = SanitizeKind.RACES in kinds
        wants_waits = self._watches_uses or SanitizeKind.WAITS in kinds
        self._waits: WaitCheck | None = None
        if wants_waits:
            sampler = ResultSampler(path, lambda: self._recorder.place())
            self._waits = WaitCheck(self._note, lambda: self._recorder.site(), sampler)
        if self._waits is not None:
            self._checks.append(self._waits)
        if SanitizeKind.REPLICAS in kinds:
            self._checks.append(ReplicaCheck(path, lambda: self._recorder.line()))
        self._recorder = CallRecorder(self._log, self._checks)
        self.has_shorter_timeouts = self._recorder.has_shorter_timeouts
        self._pid = os.getpid()
        if plan is not None:
            self._recorder.faults = FaultsOfRank(rank, plan, self._log, path, wait_for_peers)
        operation_hook.hook.tell(self._recorder)
        collective_errors.errors.on_error = self._log.error_now
        watched_waits.hooks.tell(self._listener_to_waits())
        if self._waits is not None and self._watches_uses:
            self._waits.watch_uses(other_threads=True)

    def _note(self, kind: str, text: str, site: int, issued: int) -> None:
        self._log.note({"kind": kind, "text": text, "issued": issued}, site)

    def _listener_to_waits(self) -> watched_waits.WaitListener:
        if (waits := self._waits) is None:
            return watched_waits.WaitListener(on_error=self._on_error_of_wait)
        return watched_waits.WaitListener(waits.waited, self._on_error_of_wait, waits, waits.wait_is_over)

    def _on_error_of_wait(self) -> None:
        self._log.error_now()
        collective_errors.errors.note()

    def finish(self) -> None:
        """The test has returned: what is open now stays open. Raises what the recorder has failed with."""
        if os.getpid() != self._pid:
            return
        _leave_alone()
        if self._recorder.faults is not None:
            self._recorder.faults.finish()
        self._recorder.note_groups()
        for check in self._checks:
            check.finish()
        if self._recorder.error:
            raise RecorderError(f"the sanitizer failed, so its findings are not complete:\n{self._recorder.error}")


class ProcessSanitizer:
    """The sanitizer of this process: none, or that of the test that runs in it."""

    def __init__(self) -> None:
        self._current: RankSanitizer | None = None

    def prepare(self, wanted: bool) -> None:
        """Install the hook, for this process and those that it forks, or remove it."""
        if wanted:
            operation_hook.hook.install()
        else:
            operation_hook.hook.remove()

    def begin(
        self,
        rank: int,
        kinds: frozenset[SanitizeKind],
        delays: int | None,
        path: Path,
        plan: FaultPlan | None = None,
        wait_for_peers: Callable[[], None] = lambda: None,
    ) -> None:
        """Sanitize this process from now on; its log is a new file at `path`. `plan`: the faults of its test."""
        if self._current is None:
            os.register_at_fork(after_in_child=_leave_alone)
        self._current = RankSanitizer(rank, kinds, delays, path, plan, wait_for_peers)

    @property
    def is_active(self) -> bool:
        return self._current is not None

    def has_shorter_timeouts(self) -> bool:
        """Whether a group has got a shorter time-out since it was first used. The log does not know it."""
        return self._current is not None and self._current.has_shorter_timeouts()

    def finish(self) -> None:
        """The test has returned. Raises RecorderError."""
        current, self._current = self._current, None
        if current is not None:
            current.finish()


of_process = ProcessSanitizer()


def _leave_alone() -> None:
    """Sanitize this process no more. One that a test forks shares the memory of the log: it must not write there."""
    operation_hook.hook.leave()
    collective_errors.errors.on_error = None
    watched_waits.hooks.leave()
    watched_stores.hooks.leave()
    backend_calls.hooks.leave()
    fault_points.rank = None
