"""The world size of a test of a class with DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from torch_testing_ext._pytest_ranks.marks import NAME, BadMark, parameters, sizes_of
from torch_testing_ext._pytest_ranks.pytest_internals.item_fixtures import fixture_definitions, is_parameter

from .classes import DistributedTest


def has_size_as_argument(item: Any) -> bool:
    """Whether a test is a method of a DistributedTest that takes its world size as an argument, without a mark."""
    if item.cls is None or not issubclass(item.cls, DistributedTest) or NAME not in item.fixturenames:
        return False
    return not any(mark.name == NAME for mark in item.own_markers)


def size_of_argument(item: pytest.Function) -> int:
    """The world size that a parameter of the test gives it. Raises BadMark."""
    given = parameters(item)
    definitions = fixture_definitions(item).get(NAME, ())
    if NAME not in given or not all(is_parameter(definition) for definition in definitions):
        raise BadMark(f"its argument {NAME} is a fixture, whose value is unknown during collection. Parametrize it")
    return single_size(given[NAME])


def single_size(size: Any) -> int:
    """Check one world size as if a mark had it. Raises BadMark."""
    (checked,) = sizes_of(mark_of(size, {}))
    return checked


def mark_of(sizes: Any, keywords: Mapping[str, Any]) -> pytest.Mark:
    """The mark `world_size` with these sizes and keywords."""
    made: pytest.Mark = getattr(pytest.mark, NAME)(sizes, **keywords).mark
    return made
