"""Would a suite notice? Its tests run here with a fault in every rank, and must fail and say what is wrong."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch_testing_ext.common_utils import TestCase

SUITES = Path(__file__).parents[2] / "distributed"
Fault = Callable[[], AbstractContextManager[Any]]


def load(path: str) -> ModuleType:
    """A suite, under a name of its own: its tests are not to be found, and run again, here."""
    file = SUITES / path
    spec = importlib.util.spec_from_file_location(f"faulty_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Case(NamedTuple):
    """`message`: a pattern of what the failure says."""

    suite: type
    test: str
    fault: Fault = nullcontext
    message: str = ""

    @property
    def class_name(self) -> str:
        return f"{self.suite.__name__}_{self.fault.__name__}"


def case_name(case: Case) -> str:
    return f"{case.fault.__name__}_in_{case.test.removeprefix('test_')}"


class InRanks:
    """Puts `fault` around the test, in each rank."""

    fault: Fault

    def run_test(self, name: str, pipe: Any) -> None:
        with type(self).fault():
            super().run_test(name, pipe)  # type: ignore[misc]


class Faulty:
    """A module has one of these, which holds its suites with their faults: out of a test loader's sight, but to be
    found by ranks that import the module anew."""

    def __init_subclass__(cls, cases: Sequence[Case]) -> None:
        for case in cases:
            body = {"fault": staticmethod(case.fault), "__module__": cls.__module__}
            names = {"__qualname__": f"{cls.__qualname__}.{case.class_name}"}
            setattr(cls, case.class_name, type(case.class_name, (InRanks, case.suite), {**body, **names}))


class SuiteFaultsTestCase(TestCase):
    def run_with_fault(self, faulty: type[Faulty], case: Case) -> unittest.TestResult:
        result = unittest.TestResult()
        getattr(faulty, case.class_name)(case.test).run(result)
        self.assertEqual(result.skipped, [])
        return result

    def assert_noticed(self, faulty: type[Faulty], case: Case, errors_too: bool = False) -> None:
        """`errors_too`: what the suite asserts with may raise other errors than an AssertionError."""
        result = self.run_with_fault(faulty, case)
        if not errors_too:
            self.assertEqual([text for _, text in result.errors], [])
        texts = [text for _, text in result.failures + result.errors]
        self.assertEqual(len(texts), 1, f"{case.test} passed with the fault")
        self.assertRegex(texts[0], f"(?s){case.message}")

    def assert_sound(self, faulty: type[Faulty], case: Case) -> None:
        """Or a test with a fault might fail for the way it is run here."""
        result = self.run_with_fault(faulty, case)
        self.assertEqual([text for _, text in result.errors + result.failures], [])
