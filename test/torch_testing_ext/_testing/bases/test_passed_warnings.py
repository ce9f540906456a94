"""Warnings that cross a process: raised again as they were, or as near to that as their class allows."""

from __future__ import annotations

import unittest
import warnings

from torch_testing_ext import launch
from torch_testing_ext._process import messages
from torch_testing_ext._pytest_ranks.standalone_process import FromStandalone
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import accounts
from torch_testing_ext.launch.aspects import rank_warnings


class OurWarning(UserWarning):
    """Has a module."""


class OddWarning(UserWarning):
    """Its text is not its argument."""

    def __init__(self, number: int):
        super().__init__(f"number {number + 1}")


class PassedWarningsTest(unittest.TestCase):
    def test_each_is_raised_once(self) -> None:
        class Local(UserWarning): ...

        rows = (
            ("text", UserWarning, "text", UserWarning),
            ("old", DeprecationWarning, "old", DeprecationWarning),
            (OurWarning("ours"), None, "ours", OurWarning),
            (OddWarning(1), None, "OddWarning: number 2", UserWarning),
            (Local("local"), None, "Local: local", UserWarning),
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for message, category, *_ in rows:
                warnings.warn_explicit(message, category, "file.py", 3)
                warnings.warn_explicit(message, category, "file.py", 3)
        sent = [messages.to_json(FromStandalone(warning=accounts.pack_warning(each))) for each in seen]
        received = [messages.from_json(line, messages.by_name(FromStandalone)).warning for line in sent]
        with warnings.catch_warnings(record=True) as again:
            warnings.simplefilter("always")
            rank_warnings.raise_again(received)
        self.assertEqual(
            [(str(each.message), each.category, each.filename, each.lineno) for each in again],
            [(text, category, "file.py", 3) for *_, text, category in rows],
        )

    def test_what_a_rank_let_pass_is_no_error_here(self) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("error")
            rank_warnings.raise_again([launch.OwnWarning("text", "builtins.UserWarning", "file.py", 3)])
        self.assertEqual([str(each.message) for each in seen], ["text"])


if __name__ == "__main__":
    run_tests()
