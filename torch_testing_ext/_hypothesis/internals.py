"""The only room that touches what Hypothesis does not document. Seen on 6.170; the names are as old as 6.100."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import hypothesis
from hypothesis import Phase, control, reporting, strategies as st
from hypothesis.internal.entropy import deterministic_PRNG

T = TypeVar("T")

_SETTINGS = "_hypothesis_internal_use_settings"
_SEED = "_hypothesis_internal_use_seed"
_ATTRIBUTES = ("_hypothesis_internal_", "hypothesis_explicit_examples")


def adopt_decorations(source: Callable[..., Any], target: Callable[..., Any]) -> None:
    """What @settings, @seed, @example and @reproduce_failure leave on a function that stands in for another."""
    for name, value in vars(source).items():
        if name.startswith(_ATTRIBUTES):
            setattr(target, name, value)


def settings_of(prop: Callable[..., Any]) -> hypothesis.settings:
    chosen = getattr(prop, _SETTINGS, None) or hypothesis.settings.default
    assert chosen is not None
    return chosen


def put_settings(prop: Callable[..., Any], chosen: hypothesis.settings) -> None:
    setattr(prop, _SETTINGS, chosen)


def choose_seed(prop: Callable[..., Any]) -> int | None:
    """The seed that a run is to have: the test's own, or a new one. None where the test itself determines it.

    `hypothesis.seed` would switch the database of earlier failures off with it.
    """
    given = getattr(prop, _SEED, None)
    if given is None and not settings_of(prop).derandomize:
        given = int.from_bytes(os.urandom(4), "big")
        setattr(prop, _SEED, given)
    return given


@contextmanager
def reports_into(lines: list[str]) -> Iterator[None]:
    """What Hypothesis would print."""
    with reporting.with_reporter(lambda text: lines.append(str(text))):
        yield


def inside(work: Callable[[], T]) -> T:
    """Call `work` in an example of a Hypothesis test, so that all is there that Hypothesis offers a test's body.

    It is one long example for all that a rank is told of: to begin one costs more than most collectives.
    """
    results: list[T] = []
    errors: list[Exception] = []

    @hypothesis.settings(phases=[Phase.explicit], database=None, deadline=None, derandomize=True)
    @hypothesis.example(None)
    @hypothesis.given(st.none())
    def stage(_: None) -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    stage()
    for error in errors:
        raise error
    return results[0]


@contextmanager
def next_example() -> Iterator[None]:
    """What would be anew in an example of its own: the random numbers, and the scores it is given."""
    context = control._current_build_context.value
    assert context is not None
    context.data.target_observations.clear()
    with deterministic_PRNG():
        yield
