"""How the tests of this process are run, where it is not by `python FILE` or plain pytest. Whoever runs them otherwise
(upstream's drop-in) says so here, before the tests are imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_testing_ext import launch

# What stands between `python` and the file; what pytest is given besides the test.
script: list[str] = []
pytest: list[str] = []


def _nothing(reports: Sequence[launch.RankReport], expected: launch.Expected, verdict: launch.Verdict) -> str:
    return ""


# What to add to the message of a verdict.
remark: Callable[[Sequence[launch.RankReport], launch.Expected, launch.Verdict], str] = _nothing
