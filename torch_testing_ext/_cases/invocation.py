"""How the tests of this process were invoked, if not by `python FILE` or plain pytest.

A module that runs tests in another way (upstream's drop-in) sets these before it imports the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_testing_ext import launch

python_arguments: list[str] = []  # between `python` and the file
pytest_arguments: list[str] = []  # between `pytest` and the test


def _no_note(reports: Sequence[launch.RankReport], expected: launch.Expected, verdict: launch.Verdict) -> str:
    return ""


# Returns a text to add to the message of a verdict.
verdict_note: Callable[[Sequence[launch.RankReport], launch.Expected, launch.Verdict], str] = _no_note
