"""Refusals: a marked test that cannot run as it is fails when it would run, and says why once for all parameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest

from torch_testing_ext._pytest_ranks.marks import NAME

# Options of torchtest that pytest has not.
# fmt: off
OF_RUNNER = ("--affected", "--cluster", "--gpus", "--html", "--jobs", "--repeat", "--retries", "--shard", "--shuffle",
             "--watch")
# fmt: on
# The refusals so far, each by its text, with the test that shows it.
_SHOWN: pytest.StashKey[dict[str, str]] = pytest.StashKey()


class Refused(Exception):
    """A test is not run, since it cannot run as it is."""

    is_refusal = True


def note_refusal(item: Any, why: str) -> NoReturn:
    raise Refused(_with_place(why, item))


def refuse_options_of_runner(unknown: Iterable[str]) -> None:
    """Raise UsageError for the first option that pytest does not know, and torchtest does."""
    for word in unknown:
        flag = word.partition("=")[0]
        if flag in OF_RUNNER:
            raise pytest.UsageError(f"{flag} is an option of torchtest: run torchtest {word}, in place of pytest")


def report_refusal(made: Any, error: BaseException | None, item: Any) -> None:
    """Turn the report of a refused test, and that of a test which was marked too late, into a failure that says so."""
    if isinstance(error, Refused):
        text = str(error)
    else:
        during = "its set-up" if made.when == "setup" else "its call"
        text = _with_place(
            f"@pytest.mark.{NAME} or standalone was added during {during}, which is too late. Add it in "
            f"pytest_collection_modifyitems or in pytest_runtest_setup",
            item,
        )
    made.outcome, made.longrepr = "failed", text
    # A refusal is not what was expected to fail.
    vars(made).pop("wasxfail", None)
    shown = item.config.stash.setdefault(_SHOWN, {})
    first = shown.setdefault(text, item.nodeid)
    made.is_refused_again = first != item.nodeid


def misspelt_fixture(name: str, ours: Iterable[str]) -> str | None:
    """The message on a fixture whose name is almost one of ours; None leaves it to pytest, which lists all fixtures."""
    near = difflib.get_close_matches(name, ours, 1, cutoff=0.75)
    return f"fixture '{name}' not found. Did you mean: {near[0]}?" if near else None


def _with_place(why: str, item: Any) -> str:
    """The cause, and the line of the test: the same text for all of its parameters."""
    file, line, _ = item.location
    name = getattr(item, "originalname", None) or item.name
    return f"{why}\n\n{file}:{(line or 0) + 1}: {name}"
