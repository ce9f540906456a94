"""The verdict on a standalone test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._testing.bases.rank_verdicts import RankError, RankFailure
from torch_testing_ext._tests import notes
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.aspects import rank_warnings

from .pytest_internals import item_state
from .reports import LONGEST_SECTION, TestReports
from .standalone_process import FromStandalone


def show(item: Any, received: list[FromStandalone], output: str) -> None:
    """Pass on captured output, properties and warnings."""
    reports = [message.report for message in received if message.report]
    if reports:
        # The last one repeats the sections and properties of those before it.
        _show_report(item, json.loads(reports[-1]))
    rank_warnings.raise_again(message.warning for message in received if message.warning is not None)
    for message in received:
        notes.note_left_running(message.left_running)
    if output.strip():
        item.add_report_section("call", "stdout and stderr of the interpreter", cut_middle(output, LONGEST_SECTION))


def _show_report(item: Any, report: dict[str, Any]) -> None:
    """Pass on the sections and properties of a serialised report."""
    for title, text in report.get("sections", ()):
        name, _, when = title.removeprefix("Captured ").rpartition(" ")
        item.add_report_section(when, name, cut_middle(text, LONGEST_SECTION))
    for pair in report["user_properties"]:
        item.user_properties.append(tuple(pair))


def judge(item: Any, received: list[FromStandalone], code: int | None, how: str) -> None:
    """Raise unless the test has passed and all is over: by every report, and by the end of the process."""
    __tracebackhide__ = True
    hook = item.config.hook
    reports = TestReports()
    for message in received:
        if message.report:
            data = json.loads(message.report)
            reports.add(hook.pytest_report_from_serializable(config=item.config, data=data))
    expected_code = 0
    for judged in reports.judge():
        if judged.outcome.is_failure and judged.passed_against_xfail and item_state.is_marked_xfail(item):
            # pytest says the same here, when the test has passed.
            expected_code = 1
        elif judged.outcome.is_failure and not judged.is_unfinished:
            during = f"in its {judged.phase}: " if judged.phase else ""
            raise RankFailure(f"{during}{judged.title}\n\n{judged.text}")
    if code != expected_code or reports.missing():
        refusals = "\n".join(message.refusal for message in received if message.refusal)
        raise RankError(f"the interpreter of this standalone test {how}\n\n{refusals}".strip())
    if judged.outcome is TestOutcome.EXPECTED_FAILURE:
        raise pytest.xfail.Exception(judged.reason)
    if judged.outcome is TestOutcome.SKIPPED:
        raise item_state.skip_at_test(judged.reason)
