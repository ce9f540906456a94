"""`run_test.py show`: all that is known of failures, from the journal of a run and from the files that tests keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_testing_ext._process import kept_accounts
from torch_testing_ext.launch.folding import warnings_once

from ..model import Attempt, Category
from . import text
from .journal import JournalError, find, read


def accounts(places: Sequence[Path], names: Sequence[str]) -> Iterator[str]:
    """The newest account of each failed test in journals and folders with a cache; of all tests without names."""
    found: dict[str, tuple[float, str]] = {}
    names = [text.one_line(name) for name in names]
    for place in places:
        for test, account, at in (*_of_run(place), *kept_accounts.kept(place)):
            if _is_named(test, names) and found.get(test, (0.0, ""))[0] < at:
                found[test] = at, account
    for test, (_, account) in found.items():
        yield f"{test}\n{'=' * min(len(test), 80)}\n{account}\n"


def _of_run(place: Path) -> Iterator[tuple[str, str, float]]:
    try:
        path = find(place)
        run = read(path)
    except (JournalError, OSError):
        return
    at = path.stat().st_mtime
    for one in run.summary.finished:
        if any(run.header.policy.verdict(attempt.outcome) is Category.FAILED for attempt in one.attempts):
            yield text.test_name(one.test.id), "\n\n".join(_account(attempt) for attempt in one.attempts), at


def _account(attempt: Attempt) -> str:
    parts = [f"{attempt.outcome.value} after {text.duration(attempt.seconds)}, attempt {attempt.number}"]
    parts += [text.account(attempt)]
    parts += [f"output of {heading}:\n{warnings_once(words)}" for heading, words in text.logs(attempt)]
    parts += text.leftovers(attempt)
    return "\n\n".join(part for part in parts if part)


def _is_named(test: str, names: Sequence[str]) -> bool:
    """Is the test one of these? A name may lack the file, the class or the parts that the test's folders have."""
    spelled = (test, test.replace("::", "."))
    return not names or any(
        one == name or one.endswith((f"::{name}", f".{name}", f"/{name}")) for name in names for one in spelled
    )
