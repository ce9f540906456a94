"""Budgets of communication: files that are compared, or written."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from torch_testing_ext._process.declarations import AskedOptions, Level, Option, Setting, either, number
from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext.launch.aspect import Aspect

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt

IS_UPDATED = Setting("TORCH_TESTING_EXT_UPDATE_BUDGETS", "0 or 1", either("0", "1"), False)
# All processes of a run know when it has begun. Without a run, it is this process.
UPDATED_SINCE = Setting("_TORCH_TESTING_EXT_BUDGETS_SINCE", "a time in nanoseconds", number, time.time_ns())
_UPDATE = Option(
    "update_budgets",
    "execution",
    read_boolean,
    "write the communication budgets of tests",
    kind=bool,
    default=False,
    setting=IS_UPDATED,
    pytest_help="write the communication budgets of tests",
    apart={
        "cluster": "the files of budgets are on this machine",
        "simulate": "a budget is that of the ranks which its test has. Leave out one of them",
    },
    configurable=False,
    # A failure is looked at against the budget that there is.
    in_command=False,
    level=Level.HELP_ALL,
)


class BudgetsOfTests(Aspect):
    """Has tests write their budgets instead of keeping them."""

    name = "budgets"
    is_always_on = False
    options = (_UPDATE,)
    settings = (UPDATED_SINCE,)

    def begin(self, asked: AskedOptions, runs_tests: bool) -> None:
        if asked.value(_UPDATE) or IS_UPDATED.value():
            os.environ[UPDATED_SINCE.name] = str(time.time_ns())

    def prepare(self, attempt: RankAttempt) -> None:
        # A new interpreter would take the time of its own import.
        attempt.environ[UPDATED_SINCE.name] = str(UPDATED_SINCE.value())


BUDGETS = BudgetsOfTests()
