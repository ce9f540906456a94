"""Looks at the ranks of a run: whether they wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch_testing_ext.launch.accounts import now
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.verdict import Expected

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings.finding import Finding
    from torch_testing_ext.launch.logs_of_ranks import Logs
    from torch_testing_ext.launch.probes import Prober


# Seconds without news until ranks that are not sanitized are looked at for the first time: when the prober is due. Most
# tests are over by then, and have not imported it.
FIRST_LOOK = 0.75


class Looks:
    """Looks whether the ranks of a run wait for each other, by a prober that is made for the first look.

    `endless`: the time-out of collectives that do not end by themselves; None: nobody looks.
    """

    def __init__(self, run: Run, expected: Expected, logs: Logs | None, endless: float | None):
        self.finding: Finding | None = None
        # The reason why a deadlock is not proven.
        self.doubt = ""
        self._run = run
        self._expected = expected
        self._logs = logs
        self._endless = endless
        self._prober: Prober | None = None
        self._last_news = now()

    @property
    def due(self) -> float | None:
        """The moment of the next look; None: never."""
        if self._endless is None:
            return None
        if self._prober is not None:
            return self._prober.due
        return self._last_news + (0.0 if self._logs else FIRST_LOOK)

    def give_up(self) -> None:
        """Look no more."""
        self._endless = None

    def on_news(self, at: float) -> None:
        """Something has happened in the run: wait a while before the next look."""
        self._last_news = at
        if self._prober is not None:
            self._prober.on_news(at)

    def look(self, pending: Sequence[int], ends: Mapping[int, tuple[str, bytes]]) -> None:
        """Look once. `ends`: for each rank that has ended, how, and the collectives that it has left."""
        if self._prober is None:
            self._prober = self._make_prober()
        self.finding = self._prober.step(now(), pending, ends)
        self.doubt = self._prober.doubt

    def _make_prober(self) -> Prober:
        from torch_testing_ext._collectives.proof.proof_of_hang import ProofRules
        from torch_testing_ext.launch.probes import Prober

        assert self._endless is not None
        # With DETAIL, torch compares the calls itself, and a test may expect its error.
        debug = self._run.job.context.environ.get("TORCH_DISTRIBUTED_DEBUG", "")
        is_checked = debug.upper() == "DETAIL"
        of_survivors = self._expected.faults is not None and not self._expected.may_differ
        rules = ProofRules(self._endless, self._expected.is_uneven, self._run.job.world_size, of_survivors)
        return Prober(self._run, rules, self._logs, self._last_news, is_checked=is_checked)
