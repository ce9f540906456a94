"""The time limit of tests in ranks that set none themselves."""

from __future__ import annotations

from torch_testing_ext._process.declarations import Option, Setting
from torch_testing_ext._process.setting_names import DEFAULT_TIMEOUT
from torch_testing_ext._process.setting_readers import read_seconds
from torch_testing_ext.launch.aspect import Aspect


def _seconds(text: str) -> float:
    # Infinity is PyTorch's, too.
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


# PyTorch's own variable. The test classes read it when they are imported.
LIMIT = Setting(DEFAULT_TIMEOUT, "seconds, such as 300", _seconds, 300.0)
_OF_PYTEST = Option(
    "rank_timeout",
    "execution",
    read_seconds,
    metavar="SECONDS",
    kind=float | None,
    pytest_help="time limit of each test in ranks whose mark has no timeout (default: 300)",
    in_runner=False,
)


class TimeLimit(Aspect):
    """Kills the ranks of a test that takes too long."""

    name = "time limit"
    is_always_on = False
    options = (_OF_PYTEST,)
    settings = (LIMIT,)


TIME_LIMIT = TimeLimit()
