"""Compares the outcomes of one test on PyTorch's bases and on ours. Pure: no process, no file.

A corpus file names the differences that it expects:

    STRICTER = {"Class.test": ("the event of a row of the table in docs/guides/test-classes.md", "failed")}
    NEWER = {"Class.test": "2.15"}

STRICTER: our outcome, and why it may differ. NEWER: on an older torch, ours does what that version of torch does. With
NEWER = "2.15", that holds for the whole file, and its tests do not run on an older PyTorch's bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Recorded = Mapping[str, Any]  # what a worker wrote about one test
BAD = {"failed", "error"}
NOT_RUN = "notes of the class"
GENERIC_SKIP = "<generic>"
LONGEST = 120  # characters of a message that are compared: very long ones are cut in the middle


@dataclass(frozen=True)
class Allowed:
    """A difference that the corpus expects: the sentence it rests on, and our outcome."""

    sentence: str
    outcome: str


def outcome_of(test: Recorded) -> str:
    """One word for a test; several reports of one test, such as of subtests, are joined."""
    return " + ".join(report["outcome"] for report in test["reports"]) or NOT_RUN


def recorded(test: Recorded) -> dict[str, Any]:
    """What is kept of a test on PyTorch's side: no text with paths or times."""
    reports = []
    for report in test["reports"]:
        kept = {key: report[key] for key in ("outcome", "reason", "subtest") if report.get(key)}
        if report.get("says"):
            kept["says"] = sorted({line[:LONGEST] for line in report["says"]})
        reports.append({**kept, "type": report["types"][0]} if "types" in report else kept)
    return {"reports": reports, "notes": test["notes"]}


def differences(theirs: Recorded, ours: Recorded) -> Iterator[str]:
    """Describe how ours differs. `theirs` as recorded() keeps it."""
    if len(theirs["reports"]) != len(ours["reports"]):
        yield f"outcome: {outcome_of(theirs)} on PyTorch's, {outcome_of(ours)} on ours"
    else:
        for one, other in zip(theirs["reports"], ours["reports"], strict=True):
            yield from _differences_of_reports(one, other)
    ranks = sorted({*theirs["notes"], *ours["notes"]})
    for rank in ranks:
        one, other = theirs["notes"].get(rank, []), ours["notes"].get(rank, [])
        if one != other:
            yield f"notes of {rank}: {one} on PyTorch's, {other} on ours"


def _differences_of_reports(theirs: Recorded, ours: Recorded) -> Iterator[str]:
    # An exception in a rank is an error of PyTorch's test, and a failure of ours if it is a failed assertion.
    alike = theirs["outcome"] == ours["outcome"] or {theirs["outcome"], ours["outcome"]} <= BAD
    if not alike:
        yield f"outcome: {outcome_of({'reports': [theirs]})} on PyTorch's, {outcome_of({'reports': [ours]})} on ours"
        return
    if theirs.get("subtest") != ours.get("subtest"):
        yield f"subtest: {theirs.get('subtest')} on PyTorch's, {ours.get('subtest')} on ours"
    # PyTorch's base has one text for all skips of ranks; ours tells the ranks' own reason.
    if theirs.get("reason") not in (ours.get("reason"), GENERIC_SKIP):
        yield f"reason: {theirs.get('reason')!r} on PyTorch's, {ours.get('reason')!r} on ours"
    if "type" in theirs and theirs["type"] not in ours["types"]:
        yield f"type: {theirs['type']} on PyTorch's, {ours['types']} on ours"
    lacking = [line for line in theirs.get("says", ()) if line not in ours.get("text", "")]
    if lacking:
        yield f"message: ours lacks {lacking}"


def judge(theirs: Recorded | None, ours: Recorded | None, allowed: Allowed | None) -> list[str]:
    """Return what is wrong about one test: nothing if both sides agree, or differ as allowed."""
    if theirs is None or ours is None:
        return [f"only {'ours' if theirs is None else 'PyTorch'} has this test"]
    found = list(differences(theirs, ours))
    if allowed is None:
        return found
    if not found:
        return [f"the allowed difference does not occur: {allowed.sentence!r}"]
    if outcome_of(ours) != allowed.outcome:
        return [f"ours is {outcome_of(ours)}, not {allowed.outcome} as allowed by {allowed.sentence!r}", *found]
    return []
