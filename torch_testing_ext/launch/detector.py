"""Finds ranks that disagree or wait for each other while they run: by probes, and in the logs of sanitized ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch_testing_ext._collectives.findings import Finding
from torch_testing_ext._collectives.proof import ProofRules

from .client import Run
from .probes import Prober
from .sanitizer_logs import LiveLogs, Logs


class Detector:
    """Reads the logs often, which costs the ranks nothing, and probes the ranks seldom."""

    def __init__(self, run: Run, rules: ProofRules, is_checked: bool, logs: Logs, now: float):
        """`is_checked`: torch compares the calls itself."""
        self._prober = Prober(run, rules, logs, now)
        in_logs = replace(rules, may_differ=rules.may_differ or is_checked)
        self._live = LiveLogs(logs, in_logs, now) if logs else None

    @property
    def due(self) -> float:
        """The moment at which `step` is to be called next."""
        return self._prober.due if self._live is None else min(self._prober.due, self._live.due)

    def on_news(self, now: float) -> None:
        """A rank has ended: the others may end soon."""
        self._prober.on_news(now)

    def step(self, now: float, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]) -> Finding | None:
        """Look for a fault now. `ended`: for each rank that has ended, how, and what it has left."""
        if self._live is None or self._prober.due <= self._live.due:
            return self._prober.step(now, pending, ended)
        finding = self._live.step(now, pending, {rank: how for rank, (how, _) in ended.items()})
        if self._live.has_new_suspects:
            self._prober.probe_now(now)
        return finding
