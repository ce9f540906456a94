"""The run as JSON, for programs that need more than JUnit XML can express.

Names and values are stable, since programs rely on them. `docs/reference/reports.md` lists them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from torch_testing_ext._tests.outcomes import VERDICTS
from torch_testing_ext.runner.model import Attempt, FinishedTest, RankLog

from . import wording
from .failure_data import failure_data, view_of
from .recorder import History
from .sections import SECTIONS


def render_json(history: History) -> str:
    """The content of the JSON report."""
    return json.dumps(json_document(history), indent=1) + "\n"


def json_document(history: History) -> dict[str, Any]:
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
        "verdicts": {verdict.value: summary.count(verdict) for verdict in VERDICTS},
        "outcomes": Counter(finished.outcome.value for finished in summary.finished),
        "tests": [_test(finished, history) for finished in summary.finished],
        **{key: value for section in SECTIONS for key, value in section.in_json_of_run(summary).items()},
        "unfinished": [str(test.id) for test in summary.unfinished],
        "warnings": summary.warnings,
    }


def _test(finished: FinishedTest, history: History) -> dict[str, Any]:
    return {
        "id": str(finished.test.id),
        "file": finished.test.id.file,
        "line": finished.test.line,
        "repetition": finished.last.repetition,
        "outcome": finished.outcome.value,
        "counts_as": history.summary.policy.verdict_on(finished).value,
        "seconds": finished.seconds,
        "want": finished.last.end.want,
        "attempts": [_attempt(attempt) for attempt in finished.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    lease = attempt.lease
    return {
        "outcome": attempt.outcome.value,
        "message": wording.message(attempt),
        "failure": failure_data(view_of(attempt)) if attempt.outcome.is_failure else None,
        "began": attempt.began,
        "seconds": attempt.seconds,
        "devices": lease.devices,
        "sharing": {"ranks": lease.shared_by, "backend": lease.over} if lease.shared_by else None,
        "slots": lease.slots,
        "node": lease.node or None,
        "device_memory": None if attempt.end.memory is None else asdict(attempt.end.memory),
        "output": wording.log(attempt.output),
        "ranks": [_rank(log) for log in attempt.ranks],
        "leftovers": attempt.end.leftovers,
        **{key: value for section in SECTIONS for key, value in section.in_json_of_attempt(attempt.end).items()},
    }


def _rank(log: RankLog) -> dict[str, Any]:
    return {"rank": log.rank, "output": wording.log(log.output), "stacks": wording.log(log.stacks)}
