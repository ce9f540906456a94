"""Finds ranks that disagree or wait for each other while they run: by probes, and in the logs of sanitized ranks.

The modules that find faults are imported at the first look: most tests are over by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .client import Run

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings import Finding

    from .probes import Prober
    from .sanitizer_logs import LiveLogs, Logs

_FIRST_LOOK = 0.75  # seconds without news: until the prober is due for the first time


class Detector:
    """Reads the logs often, which costs the ranks nothing, and probes the ranks seldom."""

    def __init__(self, run: Run, endless: float, may_differ: bool, is_checked: bool, logs: Logs | None, now: float):
        """`endless`, `may_differ`: see `ProofRules`. `is_checked`: torch compares the calls itself."""
        self._run = run
        self._endless = endless
        self._may_differ = may_differ
        self._is_checked = is_checked
        self._logs = logs
        self._since = now
        self._prober: Prober | None = None  # until the first look
        self._live: LiveLogs | None = None
        if logs is not None:
            self._begin()

    def _begin(self) -> Prober:
        from torch_testing_ext._collectives.proof import ProofRules

        from .probes import Prober

        self._prober = Prober(self._run, ProofRules(self._endless, self._may_differ), self._logs, self._since)
        if self._logs is not None:
            from .sanitizer_logs import LiveLogs

            in_logs = ProofRules(self._endless, self._may_differ or self._is_checked)
            self._live = LiveLogs(self._logs, in_logs, self._since)
        return self._prober

    @property
    def due(self) -> float:
        """The moment at which `step` is to be called next."""
        if self._prober is None:
            return self._since + _FIRST_LOOK
        return self._prober.due if self._live is None else min(self._prober.due, self._live.due)

    def on_news(self, now: float) -> None:
        """A rank has ended: the others may end soon."""
        if self._prober is None:
            self._since = now
        else:
            self._prober.on_news(now)

    def step(self, now: float, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]) -> Finding | None:
        """Look for a fault now. `ended`: for each rank that has ended, how, and what it has left."""
        prober = self._prober or self._begin()
        if self._live is None or prober.due <= self._live.due:
            return prober.step(now, pending, ended)
        finding = self._live.step(now, pending, {rank: how for rank, (how, _) in ended.items()})
        if self._live.has_new_suspects:
            prober.probe_now(now)
        return finding
