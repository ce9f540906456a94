"""The command that runs a test of pytest again: as this run was started, for the one test."""

from __future__ import annotations

from typing import Any

import pytest

from torch_testing_ext._process import user_commands

from .marks import COMMAND
from .pytest_internals import configuration, item_state

# The options of a command line without those that only report.
_WORDS: pytest.StashKey[list[str]] = pytest.StashKey()


def command(item: Any) -> str:
    """The command that runs this test again; that of the runner, if it runs the test."""
    if COMMAND in item.stash:
        return str(item.stash[COMMAND])
    stash = item.config.stash
    if _WORDS not in stash:
        stash[_WORDS] = configuration.options_again(item.config)
    file = user_commands.relative(str(item.path))
    node = f"{file}::{item_state.name_in_file(item)}"
    # Behind an option whose value may be left out, the name of the test would be its value.
    return user_commands.command("-m", "pytest", node, *stash[_WORDS])
