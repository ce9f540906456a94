"""All that is known of failures, from the journal of a run and from the files that tests keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_testing_ext._process.logs import warnings_once
from torch_testing_ext._tests import kept_failures
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt

from . import wording
from .journal import JournalError, find_journal, read_journal


def accounts_of_failures(places: Sequence[Path], names: Sequence[str]) -> Iterator[str]:
    """The newest account of each failed test in journals and folders with a cache; of all tests without names."""
    wanted = [wording.one_line(name) for name in names]
    newest: dict[str, tuple[float, str]] = {}
    for place in places:
        for test, account, at in (*_of_run(place), *kept_failures.kept_reports(place)):
            if not _is_named(test, wanted):
                continue
            before, _ = newest.get(test, (0.0, ""))
            if before < at:
                newest[test] = at, account
    for test, (_, account) in newest.items():
        rule = "=" * min(len(test), 80)
        yield f"{test}\n{rule}\n{account}\n"


def _of_run(place: Path) -> Iterator[tuple[str, str, float]]:
    """The name, the account and the time of each test that has failed in a run."""
    try:
        path = find_journal(place)
        run = read_journal(path)
    except (JournalError, OSError):
        return
    at = path.stat().st_mtime
    policy = run.header.policy
    for result in run.summary.finished:
        verdicts = {policy.verdict(attempt.outcome) for attempt in result.attempts}
        if TestOutcome.FAILED in verdicts:
            name = wording.test_name(result.test.id)
            account = "\n\n".join(_account(attempt) for attempt in result.attempts)
            yield name, account, at


def _account(attempt: Attempt) -> str:
    took = wording.duration(attempt.seconds)
    parts = [f"{attempt.outcome.value} after {took}, attempt {attempt.number}", wording.account(attempt)]
    for heading, words in wording.logs(attempt):
        parts.append(f"output of {heading}:\n{warnings_once(words)}")
    parts += wording.leftovers(attempt)
    return "\n\n".join(part for part in parts if part)


def _is_named(test: str, names: Sequence[str]) -> bool:
    """Whether the test is one of these. A name may lack the file, the class or what the test's folders have."""
    if not names:
        return True
    for name in names:
        endings = (f"::{name}", f".{name}", f"/{name}")
        for spelling in (test, test.replace("::", ".")):
            if spelling == name or spelling.endswith(endings):
                return True
    return False
