"""The words about a wait for peers."""

from __future__ import annotations

import os
import sys

from torch_testing_ext._process import user_commands
from torch_testing_ext._tests import launcher_variables as variables
from torch_testing_ext.launch.launched_by import Launched

# The processes of other ranks are there, and import.
LONGEST_WAIT_FOR_IMPORTS = 120.0


def _names() -> list[tuple[str, str]]:
    """The variables of rank and size that this process has, of every launcher."""
    names = [(launcher.rank, launcher.world_size) for launcher in variables.LAUNCHERS if launcher.sign in os.environ]
    # A test or a conftest may have removed them meanwhile.
    return names or [("RANK", "WORLD_SIZE")]


def how_to_unset() -> str:
    """Say how to run the same command without the variables of this launch."""
    unset = " ".join(f"-u {name}" for pair in _names() for name in pair)
    return f"Unless a launcher has started this process, run: env {unset} {user_commands.command(*sys.orig_argv[1:])}"


def _as_set(launched: Launched) -> str:
    # A test may have changed their values.
    rank, size = _names()[0]
    return f"{rank}={launched.rank} and {size}={launched.world_size} are set as in a rank"


def explain_left_variables(launched: Launched) -> str:
    return f"{_as_set(launched)}, but no other rank of that launch is running. {how_to_unset()}"


def explain_wait(launched: Launched, wanted: str = "another rank") -> str:
    """Say, while this process waits, for what it does so."""
    return (
        f"{_as_set(launched)}: this process waits up to {LONGEST_WAIT_FOR_IMPORTS:.0f} s for {wanted}. {how_to_unset()}"
    )
