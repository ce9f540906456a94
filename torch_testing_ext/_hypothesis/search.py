"""The profile "search": properties run many more examples than in CI, chosen at random, to find new faults.

Hypothesis' profiles give way to the settings of a test, and every suite has some. So this one changes them.
"""

from __future__ import annotations

import os

import hypothesis
from hypothesis import Phase

NAME = "search"
FACTOR = 40
# Ranks inherit it from the process in which an option sets it.
VARIABLE = "HYPOTHESIS_PROFILE"


def register() -> None:
    """Let Hypothesis know the profile by name."""
    hypothesis.settings.register_profile(NAME, hypothesis.settings())


def choose(name: str) -> None:
    """Choose a profile for this process and for those that it starts."""
    os.environ[VARIABLE] = name


def is_chosen() -> bool:
    """Is this run a search?"""
    return os.environ.get(VARIABLE) == NAME


def enlarged(chosen: hypothesis.settings) -> hypothesis.settings:
    """Return the settings of a property for a search, if one was chosen; else the same ones.

    A search draws examples also for a property that has only fixed ones otherwise.
    """
    if not is_chosen():
        return chosen
    phases = {*chosen.phases, Phase.generate, Phase.shrink}
    return hypothesis.settings(chosen, max_examples=FACTOR * chosen.max_examples, derandomize=False, phases=phases)
