"""An imported test file: its tests and their needs. Used only in processes that may import torch."""

from __future__ import annotations

import os
import sys
import unittest
import unittest.util
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch_testing_ext._process import file_reads, importing, user_commands
from torch_testing_ext._process.importing import ModulePlace
from torch_testing_ext._process.words import first_names
from torch_testing_ext._testing.bases import tests_for_pytest
from torch_testing_ext._testing.bases.tests_for_pytest import PytestStyleTest, pytest_style_tests
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import Attempt, Test, TestEnd, TestId

from .file_import import import_test_file, reason_to_skip
from .names_of_tests import NamedTest, NamesOfTests, names_of_classes
from .needs_of_tests import describe
from .unittest_suites import flatten, load_tests


class FileSkips(Exception):
    """The file skips all of its tests."""

    def __init__(self, reason: str, want: str | None):
        super().__init__(reason)
        self.reason = reason or "skipped"
        # What it needs, if there are not enough devices.
        self.want = want


def is_dropped_in() -> bool:
    """Whether this process runs PyTorch's own files."""
    module = sys.modules.get("torch_testing_ext.upstream.drop_in")
    return module is not None and bool(module.is_installed())


@dataclass(frozen=True)
class LoadedFile:
    """The tests of an imported file."""

    # The tests in the order of unittest or pytest.
    named: tuple[NamedTest, ...]
    # The tests by name.
    tests: dict[str, Any]
    # What cannot be run, and why.
    not_run: tuple[tuple[NamedTest, str], ...]
    # The tests that pytest does not collect; None if it was not asked.
    left_out: tuple[str, ...] | None = None
    # What pytest warns of in its settings.
    warnings_of_settings: tuple[str, ...] = ()
    # Without any, there is a warning.
    should_have_tests: bool = True

    @classmethod
    def load(cls, path: str, load_as: LoadAs | None = None) -> LoadedFile:
        """Import the file, by pytest or by unittest's loader. Raises FileSkips."""
        sys.argv[:] = [path]
        load_as = load_as or LoadAs()
        try:
            if load_as.by_pytest and tests_for_pytest.is_installed():
                return cls._by_pytest(path, load_as)
            if not is_dropped_in():
                return cls._by_unittest(path)
            from torch_testing_ext.upstream import drop_in

            with drop_in.for_import(path):
                return cls._by_unittest(path)
        except BaseException as error:
            reason = reason_to_skip(error)
            if reason is None:
                raise
            raise FileSkips(reason, getattr(error, "want", None)) from error

    @classmethod
    def _by_pytest(cls, path: str, load_as: LoadAs) -> LoadedFile:
        """Have pytest collect the file: all that it collects are the tests of the file."""
        # Once, and here: each worker would import it by itself.
        from . import pytest_run  # noqa: F401
        from .pytest_collection import Collection
        from .pytest_items import left_out, not_collected, tests_of

        # Raises if it cannot be found.
        os.stat(path)
        file_reads.ignore_walks()
        importing.forget_stdlib_test_package(ModulePlace.of(path))
        collection = Collection.of(path, load_as)
        if collection.import_error is not None:
            raise collection.import_error
        names = NamesOfTests({})
        named = tuple(names.of(test) for test in tests_of(collection))
        not_run = tuple((names.of(test), why) for test, why in not_collected(collection))
        tests = {test.name: test.test for test in named}
        warnings = collection.warnings_of_settings()
        return cls(named, tests, not_run, left_out(collection), warnings, collection.is_test_file)

    @classmethod
    def _by_unittest(cls, path: str) -> LoadedFile:
        """Import the file with sys.path as if it was run as a program, and load it as unittest does."""
        sys.path.insert(0, os.path.dirname(path))
        module = import_test_file(path)
        tests = []
        suites = []
        for part in flatten(load_tests(module)):
            if isinstance(part, unittest.BaseTestSuite):
                suites.append(part)
            else:
                tests.append(part)
        for_pytest = [(test, _why_for_pytest(test)) for test in pytest_style_tests(module, tests, _is_fixture)]
        to_run = []
        for test in tests:
            marks = tests_for_pytest.marks_that_decide(test)
            if marks:
                for_pytest.append((test, _why_marked(marks)))
            else:
                to_run.append(test)
        names = NamesOfTests(names_of_classes(module))
        not_run = [(names.of(suite), _why_not_taken_apart(suite)) for suite in suites]
        named = tuple(names.of(test) for test in to_run)
        not_run += [(names.of(test), why) for test, why in for_pytest]
        return cls(named, {test.name: test.test for test in named}, tuple(not_run))

    def listing(self, file: str, devices: int) -> tuple[Test, ...]:
        """All tests and their needs. `devices`: the number of devices of the run, on one node."""
        return tuple(describe(test, file, devices) for test in self.named)

    def list_not_run(self, file: str) -> tuple[Attempt, ...]:
        """An error for each test that is in the file, but cannot be run."""
        attempts = []
        for named, why in self.not_run:
            line = getattr(named.test, "line", 0)
            test = Test(TestId(file, named.cls, named.method), marks=None, line=line)
            attempts.append(Attempt(test, TestEnd(TestOutcome.ERROR, why)))
        return tuple(attempts)

    def warnings(self, file: str) -> tuple[str, ...]:
        """Warnings for the user about tests that are not collected, and about settings."""
        texts = [*self.warnings_of_settings]
        if self.left_out:
            shown = first_names(self.left_out, 3)
            count = len(self.left_out)
            texts.append(f"pytest leaves out {count} of the tests in {file}, by its options or hooks: {shown}")
        elif self.should_have_tests and not self.named and not self.not_run:
            loader = "unittest" if self.left_out is None else "pytest"
            texts.append(f"{file} has no tests: {loader} finds none in it")
        return tuple(texts)


def _is_fixture(function: FunctionType) -> bool:
    # It is not imported, or not installed.
    if sys.modules.get("pytest") is None:
        return False
    from torch_testing_ext._pytest_ranks.pytest_internals import item_fixtures

    return item_fixtures.is_fixture(function)


def _why_not_taken_apart(suite: unittest.BaseTestSuite) -> str:
    return (
        f"not run: {type(suite).__qualname__} has a run() of its own, and tests: {suite.countTestCases()}\n"
        "the runner takes suites apart, since it runs each test in a process of its own. Use class or module\n"
        "fixtures instead (setUpClass, setUpModule), or run the file with unittest."
    )


def _why_for_pytest(test: PytestStyleTest) -> str:
    return f"{tests_for_pytest.why_not_run(test)}, {_remedy()}\n{tests_for_pytest.if_no_test(test)}"


def _why_marked(marks: Sequence[str]) -> str:
    return f"not run: only pytest heeds its marks ({', '.join(marks)}), {_remedy()}"


def _remedy() -> str:
    """Say what to do so that pytest loads the file."""
    if not tests_for_pytest.is_installed():
        install = user_commands.command("-m", "pip", "install", "pytest")
        return f"and pytest is not installed\nInstall pytest ({install})."
    return "and unittest loads the file, as PyTorch does\nLet pytest load it: -o loader=pytest."
