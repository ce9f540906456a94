"""Runs tests of a suite with a fault in every rank, and checks that they fail with a message that names the problem."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from torch_testing_ext.common_utils import TestCase

from .outcomes import AccountsResult

SUITES = Path(__file__).resolve().parents[2] / "distributed"
Fault = Callable[[], AbstractContextManager[Any]]


def load(path: str) -> ModuleType:
    """Import a suite's file under a name of its own, where no test loader finds its tests and runs them again."""
    file = SUITES / path
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for the modules beside it
    spec = importlib.util.spec_from_file_location(f"faulty_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Case(NamedTuple):
    """A test of a suite, a fault to put into its ranks, and a pattern that the failure's message matches."""

    suite: type
    test: str
    fault: Fault = nullcontext
    message: str = ""

    @property
    def class_name(self) -> str:
        return f"{self.suite.__name__}_{self.fault.__name__}"


def case_name(case: Case) -> str:
    return f"{case.fault.__name__}_in_{case.test.removeprefix('test_')}"


def output_is_not_reduced() -> AbstractContextManager[Any]:
    """A Rowwise layer returns its partial sums."""
    return mock.patch.object(
        RowwiseParallel, "_prepare_output_fn", staticmethod(lambda layouts, local, module, out, mesh: out.to_local())
    )


def first_layer_is_gathered(suite: ModuleType) -> AbstractContextManager[Any]:
    """A Colwise layer's output is gathered, and a Rowwise layer shards it again: right, but for the communication."""

    class Gathering(ColwiseParallel):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "output_layouts": Replicate()})

    class FromReplicated(RowwiseParallel):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "input_layouts": Replicate()})

    return mock.patch.multiple(suite, ColwiseParallel=Gathering, RowwiseParallel=FromReplicated)


class RunsWithFault:
    """Runs the test, or what it trains under layouts, within `fault`, in each rank."""

    fault: Fault

    def run_test(self, name: str, pipe: Any) -> None:
        with type(self).fault():
            super().run_test(name, pipe)  # type: ignore[misc]

    def train(self, *args: Any, **options: Any) -> None:
        with type(self).fault():
            super().train(*args, **options)  # type: ignore[misc]


class FaultySuites:
    """Holds the suites with their faults, as attributes of one class in each test module.

    Test loaders do not see them there, but ranks that import the module find them by their qualified names.
    """

    def __init_subclass__(cls, cases: Sequence[Case]) -> None:
        for case in cases:
            body = {"fault": staticmethod(case.fault), "__module__": cls.__module__}
            names = {"__qualname__": f"{cls.__qualname__}.{case.class_name}"}
            setattr(cls, case.class_name, type(case.class_name, (RunsWithFault, case.suite), {**body, **names}))


class SuiteFaultsTestCase(TestCase):
    """Runs the cases of a module, and asserts that they fail, or pass."""

    def run_with_fault(self, faulty: type[FaultySuites], case: Case) -> unittest.TestResult:
        result = AccountsResult()
        getattr(faulty, case.class_name)(case.test).run(result)
        self.assertEqual(result.skipped, [])
        return result

    def assert_caught(self, faulty: type[FaultySuites], case: Case, errors_too: bool = False) -> None:
        """The test fails with the case's message; with `errors_too`, by any exception, not only AssertionError."""
        result = self.run_with_fault(faulty, case)
        if not errors_too:
            self.assertEqual(result.errors, [], "\n".join(text for _, text in result.errors))
        texts = [text for _, text in result.failures + result.errors]
        self.assertEqual(len(texts), 1, f"{case.test} passed with the fault")
        self.assertRegex(texts[0], f"(?s){case.message}")

    def assert_sound(self, faulty: type[FaultySuites], case: Case) -> None:
        """The test passes without a fault: those with a fault do not fail because of how they run here."""
        result = self.run_with_fault(faulty, case)
        self.assertEqual([text for _, text in result.errors + result.failures], [])
