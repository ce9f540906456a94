"""The run as JSON, for programs that need more than JUnit XML can express. Pure.

Names and values are stable, since programs rely on them. `docs/run_test.md` lists them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from ..model import Attempt, Category, FinishedTest
from . import text
from .history import History


def render(history: History) -> str:
    """The content of the JSON report."""
    return json.dumps(document(history), indent=1) + "\n"


def document(history: History) -> dict[str, Any]:
    """The JSON report as a dictionary."""
    run, summary = history.run, history.summary
    return {
        "header": asdict(run.header),
        "began": run.clock,
        "seconds": summary.seconds,
        "devices": run.devices,
        "made_up_devices": run.fake,
        "slots": run.slots,
        "nodes": [{"name": node.name, "devices": node.devices, "slots": node.slots} for node in run.nodes],
        "seed": run.seed,
        "interrupted": summary.interrupted,
        "error": summary.error,
        "verdicts": {category.value: summary.count(category) for category in Category},
        "outcomes": Counter(one.outcome.value for one in summary.finished),
        "tests": [_test(one, history) for one in summary.finished],
        "unfinished": [str(test.id) for test in summary.unfinished],
        "warnings": summary.warnings,
    }


def _test(one: FinishedTest, history: History) -> dict[str, Any]:
    return {
        "id": str(one.test.id),
        "file": one.test.id.file,
        "line": one.test.line,
        "repetition": one.last.repetition,
        "outcome": one.outcome.value,
        "counts_as": history.summary.policy.verdict_on(one).value,
        "seconds": one.seconds,
        "want": one.last.want,
        "attempts": [_attempt(attempt) for attempt in one.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "outcome": attempt.outcome.value,
        "message": text.message(attempt),
        "began": attempt.began,
        "seconds": attempt.seconds,
        "devices": attempt.lease.devices,
        "sharing": {"ranks": attempt.lease.shared_by, "backend": attempt.lease.over}
        if attempt.lease.shared_by
        else None,
        "slots": attempt.lease.slots,
        "node": attempt.lease.node or None,
        "device_memory": asdict(attempt.memory) if attempt.memory is not None else None,
        "output": text.log(attempt.output),
        "ranks": [
            {"rank": one.rank, "output": text.log(one.output), "stacks": text.log(one.stacks)} for one in attempt.ranks
        ],
        "leftovers": attempt.leftovers,
    }
