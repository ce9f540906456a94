"""Warnings of ours to the user, about tests that pass."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from contextlib import suppress

from torch_testing_ext._tests.notes import warn_user


class RankWarning(UserWarning):
    """Something to know although the test passes."""


def show_to_user(text: str) -> None:
    """Warn the user; in pytest, which hides what a test that passes prints, by a warning of Python's, too."""
    warn_user(text)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        # A filter that makes warnings errors means those of the test.
        with suppress(RankWarning):
            warnings.warn_explicit(text, RankWarning, "torch_testing_ext", 1)


say_once = functools.cache(show_to_user)
