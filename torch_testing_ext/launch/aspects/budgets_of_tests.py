"""Budgets of communication: files that are compared, or written."""

from __future__ import annotations

from torch_testing_ext._process.declarations import Level, Option, Setting, either
from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext.launch.aspect import Aspect

IS_UPDATED = Setting("TORCH_TESTING_EXT_UPDATE_BUDGETS", "0 or 1", either("0", "1"), False)
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


BUDGETS = BudgetsOfTests()
