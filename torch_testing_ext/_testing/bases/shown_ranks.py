"""Ranks whose output is shown if they pass: those of functions and scripts."""

from __future__ import annotations

from torch_testing_ext import launch
from torch_testing_ext._process.logs import text_of
from torch_testing_ext.launch.attempts import ProcessHost, RankAttempt, RanksEnd

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


class ShownRanks(ProcessHost):
    """Ranks whose output is shown if they pass."""

    def __init__(self) -> None:
        # What each rank has printed.
        self.outputs: tuple[str, ...] = ()

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        # A rank that is debugged has the terminal, and no file.
        ranks = range(attempt.plan.world_size)
        self.outputs = tuple(text_of(attempt.directory / f"rank{rank}.log") for rank in ranks)
        if end.verdict.outcome is launch.TestOutcome.PASSED:
            for rank, output in enumerate(self.outputs):
                for line in output.splitlines():
                    print(f"[rank{rank}] {line}")
        return end
