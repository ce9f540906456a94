"""The run as JUnit XML, with retried tests in the format of Maven's Surefire and nextest. Pure.

A test that failed in all attempts has `failure` (or `error`) for the first and `rerunFailure` for the others; a test
that finally passed has a `flakyFailure` for each failed attempt. The order of elements is that of Surefire.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from ..model import COUNTS_AS, Attempt, Category, FinishedTest, Policy, TestOutcome
from . import text
from .recorder import History
from .tree import node

# Outcomes that are a `failure` in JUnit XML; all others that do not pass are an `error`.
FAILURES = (TestOutcome.FAILED, TestOutcome.UNEXPECTED_SUCCESS, TestOutcome.FLAKY, TestOutcome.LEAKED)
ORDER = ("failure", "rerunFailure", "flakyFailure", "skipped", "error", "rerunError", "flakyError")


def render(history: History) -> str:
    """The content of the JUnit report."""
    by_file: dict[str, list[FinishedTest]] = defaultdict(list)
    for one in history.summary.finished:
        by_file[one.test.id.file].append(one)
    suites = [_suite(file, ones, history) for file, ones in by_file.items()]
    seconds = f"{history.summary.seconds:.3f}"
    root = node("testsuites", *suites, name="run_test.py", **_counts(history.summary.finished, history), time=seconds)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(file: str, ones: Sequence[FinishedTest], history: History) -> ET.Element:
    began = history.run.clock + min(one.attempts[0].began for one in ones)
    cases = [_case(one, history) for one in ones]
    return node(
        "testsuite",
        *cases,
        name=file,
        **_counts(ones, history),
        time=f"{sum(one.seconds for one in ones):.3f}",
        timestamp=datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="milliseconds"),
    )


def _counts(ones: Sequence[FinishedTest], history: History) -> dict[str, int]:
    kinds = [_kind(one, history.summary.policy) for one in ones]
    named = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    return {"tests": len(ones), **{plural: kinds.count(kind) for plural, kind in named.items()}}


def _kind(one: FinishedTest, policy: Policy) -> str | None:
    """The element for the outcome of a test; None if it passed."""
    match policy.verdict(one.outcome):
        case Category.PASSED:
            return None
        case Category.SKIPPED:
            return "skipped"
        case Category.FAILED:
            return "failure" if one.outcome in FAILURES else "error"


def _case(one: FinishedTest, history: History) -> ET.Element:
    test = one.test
    return node(
        "testcase",
        *sorted(_results(one, history.summary.policy), key=lambda element: ORDER.index(element.tag)),
        _output(one),
        name=(test.id.method or test.id.file) + text.repetition(one.last, history.run.repetitions),
        classname=_classname(test.id.file, test.id.cls),
        file=test.id.file,
        line=test.line or None,
        time=f"{one.seconds:.3f}",
    )


def _classname(file: str, cls: str) -> str:
    module = file.removesuffix(".py").replace("/", ".")
    return f"{module}.{cls}" if cls else module


def _results(one: FinishedTest, policy: Policy) -> Iterator[ET.Element]:
    kind = _kind(one, policy)
    if kind == "skipped":
        yield node("skipped", message=text.title(one.last.message))
    elif one.outcome is TestOutcome.FLAKY:
        yield from _flaky(one, policy)
    elif kind is not None:
        first, *others = one.attempts
        yield _failure(kind, one.outcome, first)
        yield from (_rerun("rerun", attempt) for attempt in others)


def _flaky(one: FinishedTest, policy: Policy) -> Iterator[ET.Element]:
    if policy.fail_flaky:
        yield _failure("failure", TestOutcome.FLAKY, one.attempts[0])
    yield from (_rerun("flaky", each) for each in one.attempts if COUNTS_AS[each.outcome] is Category.FAILED)


def _failure(tag: str, outcome: TestOutcome, attempt: Attempt) -> ET.Element:
    return node(tag, text.log(attempt.message), message=text.title(attempt.message), type=outcome.value)


def _rerun(prefix: str, attempt: Attempt) -> ET.Element:
    """A `rerunFailure`, `flakyError` and so on, which contains the output of its attempt."""
    suffix = "Failure" if attempt.outcome in FAILURES else "Error"
    children = [node("stackTrace", text.log(attempt.message)), _outputs(attempt)]
    return node(prefix + suffix, *children, message=text.title(attempt.message), type=attempt.outcome.value)


def _output(one: FinishedTest) -> ET.Element | None:
    """The output of the attempt that the test case describes; the elements of other attempts contain theirs."""
    return _outputs(one.last if one.outcome is TestOutcome.FLAKY else one.attempts[0])


def _outputs(attempt: Attempt) -> ET.Element | None:
    parts = [f"{heading}:\n{words}" for heading, words in text.logs(attempt)]
    return node("system-out", "\n\n".join(parts)) if parts else None
