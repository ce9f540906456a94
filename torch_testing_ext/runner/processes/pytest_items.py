"""The tests that pytest has collected in a file: which of them it runs, what they need, and which share fixtures."""

import importlib
import unittest
from typing import Any

from torch_testing_ext._pytest_ranks import marks
from torch_testing_ext._pytest_ranks.marks import SPEC
from torch_testing_ext._pytest_ranks.pytest_internals.item_state import is_of_unittest, name_in_file
from torch_testing_ext._testing.bases.tests_for_pytest import PytestStyleTest, PytestTest

from .pytest_collection import Collection, installed_packages, names_of_classes
from .shared_fixtures import shared_by_tests


def tests_of(collection: Collection) -> list[PytestTest]:
    """The tests that pytest has collected."""
    items = collection.items
    for item in items:
        # What is wrong with them is said when they run.
        marks.read_marks(item)
    if any(SPEC in item.stash for item in items):
        # Once, and not in each worker.
        importlib.import_module("torch_testing_ext._pytest_ranks.item_in_parent")
    together = shared_by_tests(items, installed_packages(items[0].config) if items else frozenset())
    tests = []
    for number, item in enumerate(items):
        line = (item.location[1] or 0) + 1
        tests.append(PytestTest(collection, item, _owner(item), item.name, line, together.get(number, "")))
    return tests


def _owner(item: Any) -> str:
    """The name in its file of what a test is in, such as its class."""
    return name_in_file(item).removesuffix(item.name).removesuffix("::")


def test_case(item: Any) -> unittest.TestCase | None:
    """The test case that unittest would run; None for a test of another kind."""
    if not is_of_unittest(item):
        return None
    try:
        case: unittest.TestCase = item.cls(_function_name(item))
    except Exception:
        # pytest reports the same when it runs the test.
        return None
    return case


def not_collected(collection: Collection) -> list[tuple[PytestStyleTest, str]]:
    """An error for each part of the file that pytest could not collect."""
    errors = []
    for names, text in collection.failures:
        *classes, name = names or ("",)
        test = PytestStyleTest(".".join(classes), name, 0)
        errors.append((test, f"not run: pytest cannot collect it: {text}"))
    return errors


def left_out(collection: Collection) -> tuple[str, ...]:
    """The names of tests that pytest's options and hooks leave out."""
    names = [(*names_of_classes(item), _function_name(item)) for item in collection.deselected]
    # Each once, without its parameters.
    return tuple(dict.fromkeys(".".join(parts) for parts in (*names, *collection.dropped)))


def _function_name(item: Any) -> str:
    """Without the names of its parameters."""
    return str(getattr(item, "originalname", None) or item.name)
