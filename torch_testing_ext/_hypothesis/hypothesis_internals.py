"""The undocumented parts of Hypothesis that this package uses.

No other module uses any. Checked with 6.131 and 6.170; only the constants that Hypothesis collects from code are
younger.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import hypothesis
from hypothesis import Phase, control, reporting, strategies as st
from hypothesis.internal.entropy import deterministic_PRNG

T = TypeVar("T")
_SETTINGS = "_hypothesis_internal_use_settings"
_SEED = "_hypothesis_internal_use_seed"
_EXAMPLES = "hypothesis_explicit_examples"
# Our own, of tests that our `given` has made: all ranks get the same examples.
IN_RANKS = "torch_testing_ext_in_ranks"
# Our own, which @replay sets.
REPLAYED = "torch_testing_ext_replayed"
_ATTRIBUTES = ("_hypothesis_internal_", _EXAMPLES, REPLAYED)


def copy_decorations(source: Callable[..., Any], target: Callable[..., Any]) -> None:
    """Copy what @settings, @seed, @example, @replay and @reproduce_failure set from a wrapper to its property."""
    for name, value in vars(source).items():
        if name.startswith(_ATTRIBUTES):
            setattr(target, name, value)
    # The copied list lacks the examples that earlier runs have replayed.
    setattr(target, _EXAMPLES, [*getattr(source, _EXAMPLES, ())])


def settings_of(prop: Callable[..., Any]) -> hypothesis.settings:
    """Return the settings of a property: its own, or else Hypothesis' default."""
    chosen = getattr(prop, _SETTINGS, None) or hypothesis.settings.default
    assert chosen is not None
    return chosen


def set_settings(prop: Callable[..., Any], chosen: hypothesis.settings) -> None:
    setattr(prop, _SETTINGS, chosen)


def allow_fixtures(test: Callable[..., Any]) -> None:
    """Let a test with fixtures run in ranks, which set up their fixtures once for all examples.

    Hypothesis' plugin asks in pytest's process for the fixtures of a test, unless both of its checks are left out.
    """
    chosen = settings_of(test)
    checks = hypothesis.HealthCheck
    allowed = {*chosen.suppress_health_check, checks.function_scoped_fixture, checks.differing_executors}
    set_settings(test, hypothesis.settings(chosen, suppress_health_check=tuple(allowed)))


def add_examples(prop: Callable[..., Any], examples: Sequence[Mapping[str, Any]]) -> None:
    """Add examples to those that @example gave a property. They run in their order, and in this run only."""
    # The last one runs first.
    for arguments in reversed(examples):
        add = hypothesis.example(**arguments)
        add(prop)


def choose_seed(prop: Callable[..., Any]) -> int | None:
    """Set and return the seed of a run: the test's own, or a new one. None if the test itself determines its examples.

    `hypothesis.seed` would also switch off the database of earlier failures.
    """
    seed = getattr(prop, _SEED, None)
    if seed is None and not settings_of(prop).derandomize:
        seed = int.from_bytes(os.urandom(4), "big")
        setattr(prop, _SEED, seed)
    return seed


@contextmanager
def examples_of_the_seed() -> Iterator[None]:
    """Let examples depend on the seed alone.

    Hypothesis also draws constants that it finds in the code of local modules. So what else a process has imported, or
    a change in any of these modules, would lead to other examples.
    """
    try:
        from hypothesis.internal.conjecture.providers import (  # type: ignore[attr-defined]  # it imports one of them
            CONSTANTS_CACHE,
            Constants,
            HypothesisProvider,
        )
    except ImportError:
        yield
        return
    CONSTANTS_CACHE.cache.clear()
    try:
        with mock.patch.object(HypothesisProvider, "_local_constants", Constants()):
            yield
    finally:
        CONSTANTS_CACHE.cache.clear()


@contextmanager
def capture_reports(lines: list[str]) -> Iterator[None]:
    """Append the lines that Hypothesis would print to `lines`."""
    with reporting.with_reporter(lambda text: lines.append(str(text))):
        yield


def run_in_example(work: Callable[[], T]) -> T:
    """Call `work` inside an example of a Hypothesis test, so that `assume` and the like work as in a test's body.

    A follower runs all its examples inside this single one, because starting an example costs more than most
    collectives.
    """
    results: list[T] = []
    errors: list[Exception] = []

    @hypothesis.settings(phases=[Phase.explicit], database=None, deadline=None, derandomize=True)
    @hypothesis.example(None)
    @hypothesis.given(st.none())
    def property_around(_: None) -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    property_around()
    for error in errors:
        raise error
    return results[0]


@contextmanager
def next_example() -> Iterator[None]:
    """Reset the random numbers and the recorded scores, as a new example of Hypothesis would."""
    context = control._current_build_context.value
    assert context is not None
    context.data.target_observations.clear()
    with deterministic_PRNG():
        yield
