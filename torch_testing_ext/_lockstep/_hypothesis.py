"""The only room that touches what Hypothesis does not document. Seen on 6.170; the names are as old as 6.100."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
from hypothesis import reporting

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
