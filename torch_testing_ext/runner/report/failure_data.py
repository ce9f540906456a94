"""A failure as data, for programs: in `torchtest show --json`, and in results.json.

`docs/reference/reports.md` has the schema. A field is added without a new version; one that changes gets one.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.logs import cut_middle, without_colours
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, FinishedTest, Policy

FAILURE_FORMAT = "torch_testing_ext failure 1"
# Bytes of a failure as one line.
LARGEST = 4096


class _Most(NamedTuple):
    """The most items of a list, and characters of a text."""

    items: int
    text: int


_ALL = _Most(1000, 100_000)
# The steps from all that there is to the least that helps.
_STEPS = (_Most(20, 1000), _Most(10, 400), _Most(6, 200), _Most(4, 120), _Most(3, 80), _Most(1, 60), _Most(1, 24))


def failure_data(view: FailureView, *, most: _Most = _ALL) -> dict[str, Any]:
    """The parts of a failure. The culprits are the ranks of the first row, if a test has ranks."""

    def text(words: str) -> str:
        return cut_middle(without_colours(words), most.text)

    def site(place: Site | None) -> dict[str, Any]:
        if place is None:
            return {"file": None, "line": None, "function": None}
        return {"file": text(place.file), "line": place.line, "function": text(place.function)}

    lines = view.text.strip().split("\n")[1:] if view.text is not None else []
    values = [value.text for value in view.values] or [line for line in lines if line.strip()]
    return {
        "title": text(view.headline),
        "culprits": list(view.rows[0].ranks)[: most.items * 50] if view.rows else [],
        "rows": [
            {"ranks": list(row.ranks)[: most.items * 50], "did": text(row.did), **site(row.site)}
            for row in view.rows[: most.items]
        ],
        "sites": [site(place) for place in view.sites[: most.items]],
        "waits": [
            {
                "ranks": list(wait.ranks)[: most.items * 50],
                "missing": list(wait.missing)[: most.items * 50],
                "call": text(wait.call),
                **site(wait.site),
            }
            for wait in view.waits[: most.items]
        ],
        "values": [text(value) for value in values[: most.items]],
        "printed": [text(line) for line in view.printed[-most.items :]],
        "remarks": [text(remark) for remark in view.remarks[: most.items]],
        "others": view.others,
        "commands": {"show": view.show_command or None, "rerun": view.rerun_command or None},
    }


def view_of(attempt: Attempt) -> FailureView:
    """The failure of an attempt; one of which only a text is known has that."""
    return attempt.failure if attempt.failure is not None else FailureView.of_text(attempt.message)


def failure_line(finished: FinishedTest, policy: Policy) -> str:
    """The last failure of a test, as one line of JSON of at most 4 kB."""
    failed = [each for each in finished.attempts if policy.verdict(each.outcome) is TestOutcome.FAILED]
    attempt = failed[-1]
    test = finished.test
    whole = failure_data(view_of(attempt))
    for most in _STEPS:
        parts = failure_data(view_of(attempt), most=most)
        data = {
            "format": FAILURE_FORMAT,
            "test": str(test.id),
            "file": test.id.file,
            "line": test.line,
            "kind": attempt.outcome.value,
            "outcome": finished.outcome.value,
            "attempts": len(finished.attempts),
            "seconds": round(attempt.seconds, 3),
            "world_size": test.world_size,
            **parts,
            "shortened": parts != whole,
        }
        line = json.dumps(data)
        if len(line) <= LARGEST:
            break
    return line
