"""The names of the tests of a file: no two have the same."""

from __future__ import annotations

import unittest
import unittest.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch_testing_ext._testing.bases.tests_for_pytest import PytestStyleTest, PytestTest
from torch_testing_ext.runner.model import TestId


@dataclass(frozen=True)
class NamedTest:
    """A test of a file under a name that no other test of the file has."""

    cls: str
    method: str
    # A unittest.TestCase, anything else that a unittest.TestSuite may contain, or a PytestTest.
    test: Any

    @property
    def name(self) -> str:
        return TestId("", self.cls, self.method).dotted


class NamesOfTests:
    """Gives each test of a file a name that no other has.

    The second test of a name gets `#2`: one test may be in a suite twice, and two classes may have the same name.
    """

    def __init__(self, classes: Mapping[type, str]):
        """`classes`: names of classes that their own names do not lead to."""
        self._classes = classes
        self._taken: set[str] = set()

    def of(self, test: Any) -> NamedTest:
        """Name a test as unittest or pytest selects it: by the class, for unittest as in the module, and the method."""
        if isinstance(test, PytestTest):
            cls = test.cls
            method = test.method
        elif isinstance(test, PytestStyleTest):
            cls = test.cls.replace(".", "::")
            method = test.method
        else:
            cls = self._classes.get(type(test), type(test).__qualname__)
            method = _method_name(test)
        named = NamedTest(cls, method, test)
        number = 1
        while named.name in self._taken:
            number += 1
            named = NamedTest(cls, f"{method}#{number}", test)
        self._taken.add(named.name)
        return named


def names_of_classes(module: ModuleType) -> dict[type, str]:
    """The names in the module of classes whose own name does not lead to them: classes made by a function."""
    names: dict[type, str] = {}
    for name, thing in vars(module).items():
        if isinstance(thing, type) and _look_up(module, thing.__qualname__) is not thing:
            names.setdefault(thing, name)
    return names


def _look_up(module: ModuleType, qualname: str) -> Any:
    thing: Any = module
    for part in qualname.split("."):
        thing = getattr(thing, part, None)
    return thing


def _method_name(test: Any) -> str:
    """The name of the method; of a test with an id of its own, such as a doctest, that id."""
    method = str(getattr(test, "_testMethodName", ""))
    if isinstance(test, unittest.TestCase) and type(test).id is unittest.TestCase.id:
        return method
    try:
        own = str(test.id())
    except Exception:
        own = ""
    cls = unittest.util.strclass(type(test))
    return own.removeprefix(f"{cls}.") or method or "run"
