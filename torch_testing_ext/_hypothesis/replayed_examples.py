"""Examples that are data: a property runs these in every run, and draws new ones only in a search.

A search is a run with the profile "search": properties run many more examples than in CI, chosen at random, to find new
faults. Hypothesis' profiles give way to the settings of a test, and every suite has some. So this one changes them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import hypothesis
from hypothesis import Phase

from .hypothesis_internals import REPLAYED

_SEARCH = "search"
_FACTOR = 40
# Ranks inherit it from the process in which an option sets it.
_VARIABLE = "HYPOTHESIS_PROFILE"
Test = TypeVar("Test", bound=Callable[..., None])
# A phrase that says what the example is there for, and the arguments by name.
Example = tuple[str, Mapping[str, Any]]
Examples = Sequence[Example]


def replay(examples: Examples | Mapping[int, Examples]) -> Callable[[Test], Test]:
    """Decorator: run these examples, and draw others only in a search.

        @replay([("the smallest", {"size": 1}), ("a prime", {"size": 7})])
        @given(size=integers(1, 100))
        def test_sizes(self, size): ...

    A mapping has the examples for each world size: `replay({2: [...], 4: [...]})`.
    """

    def decorate(test: Test) -> Test:
        setattr(test, REPLAYED, examples)
        return test

    return decorate


def replayed(prop: Callable[..., None], world_size: int) -> Examples | None:
    """Return what a property replays in a world of this size; None if it draws its examples."""
    examples = getattr(prop, REPLAYED, None)
    if examples is None:
        return None
    for_size: Examples = examples.get(world_size, ()) if isinstance(examples, Mapping) else examples
    if not for_size:
        raise ValueError(f"replay() has no example for {world_size} ranks: the test would pass without having run")
    return for_size


def settings_for(chosen: hypothesis.settings, examples: Examples | None) -> hypothesis.settings:
    """Return the settings for a search, if one was chosen; else those that draw nothing if the property replays."""
    if os.environ.get(_VARIABLE) != _SEARCH:
        if examples is None:
            return chosen
        return hypothesis.settings(chosen, phases=[Phase.explicit])
    phases = {*chosen.phases, Phase.generate, Phase.shrink}
    # A replayed example that fails would end the search, and cannot shrink.
    if examples is not None:
        phases -= {Phase.explicit}
    max_examples = _FACTOR * chosen.max_examples
    return hypothesis.settings(chosen, max_examples=max_examples, derandomize=False, phases=phases)


def choose_search(profile: str = _SEARCH) -> None:
    """Let Hypothesis know the profile, and choose it for this process and for those that it starts."""
    try:
        # The project's own.
        hypothesis.settings.get_profile(profile)
    except hypothesis.errors.InvalidArgument:
        hypothesis.settings.register_profile(profile, hypothesis.settings())
    os.environ[_VARIABLE] = profile


def reason_of_example(arguments: Mapping[str, Any], examples: Examples | None) -> str | None:
    """Return what a replayed example is there for; None for another example."""
    for phrase, wanted in examples or ():
        if all(arguments.get(name) is value for name, value in wanted.items()):
            return phrase
    return None
