"""An imported test file: its tests and their needs. Used only in processes that may import torch."""

from __future__ import annotations

import inspect
import os
import sys
import unittest
import unittest.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

from torch_testing_ext._cases import pytest_style
from torch_testing_ext._cases.pytest_style import PytestStyleTest, PytestTest, pytest_style_tests
from torch_testing_ext._machine.device_facts import DeviceNeeds
from torch_testing_ext._process import packages, user_commands
from torch_testing_ext._process.packages import ModulePlace
from torch_testing_ext._process.words import first_names

from ..model import Attempt, Test, TestId, TestOutcome
from .worker_messages import LoadAs

_FIXTURES = ("setUpClass", "tearDownClass")
_MODULE_FIXTURES = ("setUpModule", "tearDownModule")
_CPU_BACKENDS = {"gloo", "mpi", "fake"}  # tests that use these with accelerators declare how many


class FileSkips(Exception):
    """The file skips all of its tests."""

    def __init__(self, reason: str, want: str | None):
        super().__init__(reason)
        self.reason = reason or "skipped"
        self.want = want  # if there are not enough devices: what it needs


class NeedsPytest(Exception):
    """pytest has to import the file, in a process that has not imported it."""


@dataclass(frozen=True)
class NamedTest:
    """A test of a file under a name that no other test of the file has."""

    cls: str
    method: str
    test: Any  # a unittest.TestCase, anything else that a unittest.TestSuite may contain, or a PytestTest

    @property
    def name(self) -> str:
        return TestId("", self.cls, self.method).dotted


@dataclass(frozen=True)
class LoadedFile:
    """The tests of an imported file."""

    named: tuple[NamedTest, ...]  # in unittest's order, then in pytest's
    tests: dict[str, Any]  # by name
    not_run: tuple[tuple[NamedTest, str], ...]  # what cannot be run, and why
    left_out: tuple[str, ...] | None = None  # the tests that pytest does not collect; None if it was not asked

    @classmethod
    def load(cls, path: str, load_as: LoadAs | None = None) -> LoadedFile:
        """Import the file with sys.path and sys.argv as if it was run as a program. Raises FileSkips or NeedsPytest."""
        sys.path.insert(0, os.path.dirname(path))
        sys.argv[:] = [path]
        collection = _collect(path, load_as or LoadAs())
        try:
            module = _import(path) if collection is None else _module_of(collection)
            suite = _load_tests(module)
        except BaseException as error:
            if (reason := _reason_to_skip(error)) is not None:
                raise FileSkips(reason, getattr(error, "want", None)) from error
            raise
        parts = list(flatten(suite))
        tests = [part for part in parts if not isinstance(part, unittest.BaseTestSuite)]
        suites = [part for part in parts if isinstance(part, unittest.BaseTestSuite)]
        styled = pytest_style_tests(module, tests, _is_fixture)
        names = _Names(module)
        not_run = [(names.of(suite), _why_not_taken_apart(suite)) for suite in suites]
        if collection is not None:
            from . import pytest_run  # noqa: F401  # here, once: each worker would import it by itself
            from .pytest_items import share_out

            to_run, cannot_run, left_out = share_out(collection, tests, styled)
        elif (styled or any(map(pytest_style.has_marks, tests))) and pytest_style.is_installed():
            raise NeedsPytest
        else:
            to_run, cannot_run, left_out = tests, [(test, _why_without_pytest(test)) for test in styled], None
        named = tuple(map(names.of, to_run))
        not_run += [(names.of(one), why) for one, why in cannot_run]
        return cls(named, {one.name: one.test for one in named}, tuple(not_run), left_out)

    def listing(self, file: str, devices: int) -> tuple[Test, ...]:
        """All tests and their needs. `devices`: the number of devices of the run, on one node."""
        return tuple(describe(one, file, devices) for one in self.named)

    def list_not_run(self, file: str) -> tuple[Attempt, ...]:
        """An error for each test that is in the file, but cannot be run."""
        found = []
        for one, why in self.not_run:
            test = Test(TestId(file, one.cls, one.method), marks=None, line=getattr(one.test, "line", 0))
            found.append(Attempt(test, TestOutcome.ERROR, why))
        return tuple(found)

    def remark(self, file: str) -> str:
        """A remark for the user on tests that pytest does not collect."""
        if self.left_out:
            shown = first_names(self.left_out, 3)
            return f"pytest leaves out {len(self.left_out)} of the tests in {file}, by its options or hooks: {shown}"
        nothing = self.left_out is not None and not self.named and not self.not_run
        return f"{file} has no tests: neither unittest nor pytest finds one in it" if nothing else ""


def _is_fixture(function: FunctionType) -> bool:
    if sys.modules.get("pytest") is None:  # not imported, or not installed
        return False
    from torch_testing_ext._pytest_ranks import pytest_internals

    return pytest_internals.is_fixture(function)


# -- the import


def _import(path: str) -> ModuleType:
    """Import a file as a member of its package, or as a program if it is in none or another one has the name."""
    place = ModulePlace.of(path)
    packages.forget_stdlib_test_package(place)
    if not place.packages or place.obstacle():
        name = place.name.rpartition(".")[2]
        return packages.import_file(f"{name}_as_program" if name in sys.modules else name, path)
    if str(place.root) not in sys.path:  # behind the file's folder, and last if the root has another torch
        sys.path.insert(len(sys.path) if (place.root / "torch").is_dir() else 1, str(place.root))
    packages.import_packages(place)
    # The package may have imported the file already.
    file = getattr(sys.modules.get(place.name), "__file__", None)
    is_imported = file is not None and os.path.realpath(file) == os.path.realpath(path)
    return sys.modules[place.name] if is_imported else packages.import_file(place.name, path)


def how_to_import(error: BaseException, path: str) -> str:
    """Advice if an import failed because the file is imported as a program; or ""."""
    if not isinstance(error, ImportError) or "relative import" not in str(error):
        return ""
    place, folder = ModulePlace.of(path), os.path.dirname(path)
    if obstacle := place.obstacle():
        why = f"{obstacle}, so the file is not imported as {place.name}"
    elif place.packages:
        return f"The file is imported as {place.name}, from {place.root}: the import leads out of {place.packages[0]}."
    else:
        why = f"{folder} has no __init__.py"
    return (
        f"The file is imported as a program, as by `python {os.path.basename(path)}`, because {why}.\n"
        "A program has no relative imports. Its folder is the first in sys.path: import what lies there by its name\n"
        "alone (`from helper import f`, not `from .helper import f`). Or make the folder a package, by an __init__.py\n"
        "in it: then the file is imported as a member of that package."
    )


def _reason_to_skip(error: BaseException) -> str | None:
    """The reason if an exception skips the file: unittest's, or pytest's (`pytest.importorskip`)."""
    if isinstance(error, unittest.SkipTest):
        return str(error)
    pytest = sys.modules.get("pytest")
    if pytest is not None and isinstance(error, pytest.skip.Exception) and error.allow_module_level:
        return str(error)
    return None


# -- tests for pytest


def _collect(path: str, load_as: LoadAs) -> Any:
    """Have pytest collect the file if it seems to have tests for it; None otherwise."""
    if not (load_as.by_pytest or pytest_style.looks_like_pytest(path)) or not pytest_style.is_installed():
        return None
    from .pytest_session import Collection

    packages.forget_stdlib_test_package(ModulePlace.of(path))
    return Collection.of(path, load_as)


def _module_of(collection: Any) -> ModuleType:
    """The module that pytest has imported. Without one, pytest itself has failed: the tests of unittest run."""
    if collection.import_error is not None:
        raise collection.import_error
    module: ModuleType | None = collection.module
    return module if module is not None else _import(collection.path)


# -- the tests


def _load_tests(module: ModuleType) -> Any:
    """The suite that unittest runs."""
    loader = unittest.TestLoader()
    suite: Any = loader.loadTestsFromModule(module)
    failed: list[Any] = [test for test in suite if type(test).__name__ == "_FailedTest"] if loader.errors else []
    if failed and failed[0]._testMethodName == module.__name__:  # its load_tests raised
        raise failed[0]._exception
    return suite


def flatten(suite: Any) -> Iterator[Any]:
    """The tests of a suite, and the suites that run their tests in a way of their own."""
    if isinstance(suite, unittest.BaseTestSuite):
        whole = not _runs_as_usual(suite)
    else:
        whole = isinstance(suite, unittest.TestCase) or (callable(suite) and not hasattr(suite, "__iter__"))
    if whole:
        yield suite
    elif hasattr(suite, "__iter__") and not isinstance(suite, (str, bytes)):
        for part in suite:
            yield from flatten(part)
    else:
        raise TypeError(f"load_tests returned, or put into a suite, {suite!r}, which is neither a test nor a suite")


def _runs_as_usual(suite: unittest.BaseTestSuite) -> bool:
    return all(
        getattr(type(suite), name) in (getattr(unittest.TestSuite, name), getattr(unittest.BaseTestSuite, name))
        for name in ("run", "__call__")
    )


def _why_not_taken_apart(suite: unittest.BaseTestSuite) -> str:
    return (
        f"not run: {type(suite).__qualname__} has a run() of its own, and tests: {suite.countTestCases()}\n"
        "the runner takes suites apart, since it runs each test in a process of its own. Use class or module\n"
        "fixtures instead (setUpClass, setUpModule), or run the file with unittest."
    )


def _why_without_pytest(test: PytestStyleTest) -> str:
    return (
        f"{pytest_style.why_not_run(test)}, and pytest is not installed\n"
        f"Install pytest ({user_commands.command('-m', 'pip', 'install', 'pytest')}), or make it a method of a "
        f"unittest.TestCase.\n{pytest_style.if_no_test(test)}"
    )


class _Names:
    """Gives each test of a file a name that no other has.

    The second test of a name gets `#2`: one test may be in a suite twice, and two classes may have the same name.
    """

    def __init__(self, module: ModuleType):
        self._classes = _names_of_classes(module)
        self._taken: set[str] = set()

    def of(self, test: Any) -> NamedTest:
        """Name a test as unittest or pytest selects it: by the class, for unittest as in the module, and the method."""
        if isinstance(test, (PytestStyleTest, PytestTest)):
            cls, method = test.cls.replace(".", "::"), test.method
        else:
            cls, method = self._classes.get(type(test), type(test).__qualname__), _method_name(test)
        named, number = NamedTest(cls, method, test), 1
        while named.name in self._taken:
            number += 1
            named = NamedTest(cls, f"{method}#{number}", test)
        self._taken.add(named.name)
        return named


def _names_of_classes(module: ModuleType) -> dict[type, str]:
    """The names in the module of classes whose own name does not lead to them: classes made by a function."""
    names: dict[type, str] = {}
    for name, thing in vars(module).items():
        if isinstance(thing, type) and _look_up(module, thing.__qualname__) is not thing:
            names.setdefault(thing, name)
    return names


def _look_up(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _method_name(test: Any) -> str:
    """The name of the method; of a test with an id of its own, such as a doctest, that id."""
    method = getattr(test, "_testMethodName", "")
    if isinstance(test, unittest.TestCase) and type(test).id is unittest.TestCase.id:
        return str(method)
    try:
        own = str(test.id())
    except Exception:
        own = ""
    return own.removeprefix(f"{unittest.util.strclass(type(test))}.") or str(method) or "run"


def describe(one: NamedTest, file: str, devices: int) -> Test:
    test = one.test
    if isinstance(test, PytestTest):
        return _describe_pytest(one, file, devices)
    from torch_testing_ext._cases.ranked import RankedTestCase
    from torch_testing_ext._marks.needs import needs_of

    method = _method(test)
    needs = (*(() if method is None else needs_of(method)), *needs_of(type(test)))
    ranks = _world_size(test, needs)
    return Test(
        id=TestId(file, one.cls, one.method),
        world_size=ranks,
        devices=_devices(test, needs, ranks, devices),
        of_devices=DeviceNeeds.of_all(need.of_devices for need in needs),
        backend=next((need.backend for need in needs if need.backend), None),
        timeout=_timeout(test),
        has_ranks=ranks > 1 or isinstance(test, RankedTestCase),
        together=_together(type(test), one.cls),
        skip=_known_skip(test, method),
        line=_line(test),
    )


def _describe_pytest(one: NamedTest, file: str, devices: int) -> Test:
    """A test that pytest runs; if unittest would run it, too, both may say what it needs."""
    from . import pytest_items

    found = pytest_items.describe(one.test, TestId(file, one.cls, one.method), devices)
    if one.test.case is None:
        return found
    case = describe(NamedTest(one.cls, one.method, one.test.case), file, devices)
    return replace(
        found,
        world_size=max(found.world_size, case.world_size),
        devices=max(found.devices, case.devices),
        of_devices=DeviceNeeds.of_all([found.of_devices, case.of_devices]),
        backend=found.backend or case.backend,
        timeout=found.timeout or case.timeout,
        has_ranks=found.has_ranks or case.has_ranks,
        skip=case.skip if found.skip is None else found.skip,
    )


def _method(test: Any) -> Any:
    return getattr(test, getattr(test, "_testMethodName", ""), None)


def _world_size(test: Any, needs: tuple[Any, ...]) -> int:
    """The number of processes that compute at once. If reading world_size raises, the test raises when it runs."""
    try:
        if (size := int(test.world_size)) > 0:
            return size
        return max((need.world_size or need.devices for need in needs), default=1) or 1  # one for each device
    except Exception:
        return max((need.world_size for need in needs if need.world_size), default=1)


def _devices(test: Any, needs: tuple[Any, ...], ranks: int, available: int) -> int:
    """The number of accelerators that the test will use on a machine that has `available`.

    The number that it declares; and at least one per rank, if there are enough and it may use some without a
    declaration: it must not find those of another test.
    """
    from torch_testing_ext._marks.needs import declared

    marked = int(getattr(_method(test), "_min_gpus_required", 0) or 0)  # by PyTorch's own decorators
    used = max(declared(needs, available), 0 if any(need.devices for need in needs) else marked)
    # More than there are: the test would certainly skip.
    used = max(min(used, available), declared(_certain_needs_of(test), available))
    return max(used, ranks if ranks <= available and _may_use_accelerators(test, needs) else 0)


def _may_use_accelerators(test: Any, needs: tuple[Any, ...]) -> bool:
    """Whether a test may use accelerators although no decorator says how many."""
    from torch_testing_ext._cases import ranked
    from torch_testing_ext.upstream import drop_in

    device_type = _device_type(test)
    if device_type:
        return device_type != "cpu"
    backends = {need.backend for need in needs if need.backend}
    if backends:
        return not backends <= _CPU_BACKENDS
    # PyTorch's tests in one process use accelerators without a declaration that could be read here.
    return isinstance(test, ranked.RankedTestCase) or drop_in.is_installed()


def _device_type(test: Any) -> str:
    """The type of device that the test's class names, as PyTorch's device-generic tests do; "" if it names none."""
    try:
        found = getattr(test, "device_type", None)
        found = found() if callable(found) else found
    except Exception:
        return ""
    return str(found or "").partition(":")[0]


def _certain_needs_of(test: Any) -> tuple[Any, ...]:
    """The needs without which the test skips, whatever its class overrides and other decorators do."""
    from torch_testing_ext._cases.ranked import RankedTestCase
    from torch_testing_ext._marks.needs import certain_needs

    if isinstance(test, RankedTestCase) and test._decides_about_skips():
        return ()
    method = _method(test)
    return () if method is None else tuple(certain_needs(method))


def _timeout(test: Any) -> float | None:
    from torch_testing_ext._cases import ranked
    from torch_testing_ext._marks.settings_of_tests import timeout_of

    if not isinstance(test, unittest.TestCase):
        return None
    overrides = ranked.TIMEOUT_OVERRIDE if isinstance(test, ranked.RankedTestCase) else {}
    return timeout_of(test) or overrides.get(test._testMethodName)


def _together(cls: type, name: str) -> str:
    """The name of the class or module whose fixtures keep its tests in one process; "" if there are none."""
    if any(hasattr(sys.modules.get(cls.__module__), name) for name in _MODULE_FIXTURES):
        return cls.__module__
    own = any(_function(cls, name) is not _function(unittest.TestCase, name) for name in _FIXTURES)
    return name if own else ""


def _function(cls: type, name: str) -> Any:
    """A fixture's function; that of TestCase for a class without one."""
    fixture = getattr(cls, name, getattr(unittest.TestCase, name))
    return getattr(fixture, "__func__", fixture)


def _known_skip(test: Any, method: Any) -> str | None:
    for marked in (type(test), method):
        if getattr(marked, "__unittest_skip__", False):
            return getattr(marked, "__unittest_skip_why__", "") or "skipped"
    return None


def _line(test: Any) -> int:
    method = getattr(type(test), getattr(test, "_testMethodName", ""), None)
    code = getattr(inspect.unwrap(method or (lambda: None)), "__code__", None)
    return code.co_firstlineno if code else 0
