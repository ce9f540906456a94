"""An imported test file: its tests and their needs. Used only in processes that may import torch."""

from __future__ import annotations

import inspect
import os
import sys
import unittest
import unittest.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

from torch_testing_ext._machine.device_needs import DeviceNeeds
from torch_testing_ext._process import file_reads, importing, user_commands
from torch_testing_ext._process.importing import ModulePlace
from torch_testing_ext._process.words import first_names
from torch_testing_ext._testing.bases import tests_for_pytest
from torch_testing_ext._testing.bases.tests_for_pytest import PytestStyleTest, PytestTest, pytest_style_tests
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.load_as import LoadAs
from torch_testing_ext.runner.model import Attempt, Test, TestEnd, TestId

_FIXTURES = ("setUpClass", "tearDownClass")
_MODULE_FIXTURES = ("setUpModule", "tearDownModule")
# Tests that use these with accelerators declare how many.
_CPU_BACKENDS = {"gloo", "mpi", "fake"}


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
class NamedTest:
    """A test of a file under a name that no other test of the file has."""

    cls: str
    method: str
    # A unittest.TestCase, anything else that a unittest.TestSuite may contain, or a PytestTest.
    test: Any

    @property
    def name(self) -> str:
        return TestId("", self.cls, self.method).dotted


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
    # Of pytest's settings.
    warnings_of_settings: tuple[str, ...] = ()

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
            reason = _reason_to_skip(error)
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
        names = _Names({})
        named = tuple(names.of(test) for test in tests_of(collection))
        not_run = tuple((names.of(test), why) for test, why in not_collected(collection))
        tests = {test.name: test.test for test in named}
        return cls(named, tests, not_run, left_out(collection), collection.warnings_of_settings())

    @classmethod
    def _by_unittest(cls, path: str) -> LoadedFile:
        """Import the file with sys.path as if it was run as a program, and load it as unittest does."""
        sys.path.insert(0, os.path.dirname(path))
        module = _import(path)
        tests = []
        suites = []
        for part in flatten(_load_tests(module)):
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
        names = _Names(_names_of_classes(module))
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
        elif not self.named and not self.not_run:
            loader = "unittest" if self.left_out is None else "pytest"
            texts.append(f"{file} has no tests: {loader} finds none in it")
        return tuple(texts)


def _is_fixture(function: FunctionType) -> bool:
    # It is not imported, or not installed.
    if sys.modules.get("pytest") is None:
        return False
    from torch_testing_ext._pytest_ranks import pytest_internals

    return pytest_internals.is_fixture(function)


# -- the import


def _import(path: str) -> ModuleType:
    """Import a file as a member of its package, or as a program if it is in none or another one has the name."""
    place = ModulePlace.of(path)
    importing.forget_stdlib_test_package(place)
    if not place.packages or place.obstacle():
        name = place.name.rpartition(".")[2]
        if name in sys.modules:
            name += "_as_program"
        return importing.import_file(name, path)
    root = str(place.root)
    if root not in sys.path:
        # Behind the file's folder, and last if the root has another torch.
        has_torch = (place.root / "torch").is_dir()
        sys.path.insert(len(sys.path) if has_torch else 1, root)
    importing.import_packages(place)
    # The package may have imported the file already.
    file = getattr(sys.modules.get(place.name), "__file__", None)
    if file is not None and os.path.realpath(file) == os.path.realpath(path):
        return sys.modules[place.name]
    return importing.import_file(place.name, path)


def how_to_import(error: BaseException, path: str) -> str:
    """Advice if an import failed because of the package that the file is in, or is in none; or ""."""
    if not isinstance(error, ImportError):
        return ""
    place = ModulePlace.of(path)
    obstacle = place.obstacle()
    if error.name == place.name and obstacle:
        return (
            f"pytest imports the file as {place.name}, but {obstacle}. Rename {place.packages[0]}, or its __init__.py."
        )
    if "relative import" not in str(error):
        return ""
    if obstacle:
        why = f"{obstacle}, so the file is not imported as {place.name}"
    elif place.packages:
        return f"The file is imported as {place.name}, from {place.root}: the import leads out of {place.packages[0]}."
    else:
        why = f"{os.path.dirname(path)} has no __init__.py"
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


# -- the tests


def _load_tests(module: ModuleType) -> Any:
    """The suite that unittest runs."""
    loader = unittest.TestLoader()
    suite: Any = loader.loadTestsFromModule(module)
    if loader.errors:
        failed: list[Any] = [test for test in suite if type(test).__name__ == "_FailedTest"]
        if failed and failed[0]._testMethodName == module.__name__:
            # Its load_tests raised.
            raise failed[0]._exception
    return suite


def flatten(suite: Any) -> Iterator[Any]:
    """The tests of a suite, and the suites that run their tests in a way of their own."""
    is_iterable = hasattr(suite, "__iter__") and not isinstance(suite, (str, bytes))
    if _is_whole(suite):
        yield suite
    elif is_iterable:
        for part in suite:
            yield from flatten(part)
    else:
        raise TypeError(f"load_tests returned, or put into a suite, {suite!r}, which is neither a test nor a suite")


def _is_whole(suite: Any) -> bool:
    if isinstance(suite, unittest.BaseTestSuite):
        return not _runs_as_usual(suite)
    if isinstance(suite, unittest.TestCase):
        return True
    return callable(suite) and not hasattr(suite, "__iter__")


def _runs_as_usual(suite: unittest.BaseTestSuite) -> bool:
    for name in ("run", "__call__"):
        usual = (getattr(unittest.TestSuite, name), getattr(unittest.BaseTestSuite, name))
        if getattr(type(suite), name) not in usual:
            return False
    return True


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


class _Names:
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


def _names_of_classes(module: ModuleType) -> dict[type, str]:
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


def describe(named: NamedTest, file: str, devices: int) -> Test:
    """A test with its needs. `devices`: the number of devices of the run, on one node."""
    test = named.test
    if isinstance(test, PytestTest):
        return _describe_pytest(named, file, devices)
    from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
    from torch_testing_ext._testing.marks.needs import needs_of
    from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD

    method = _method(test)
    needs = needs_of(type(test))
    if method is not None:
        needs = (*needs_of(method), *needs)
    ranks = _world_size(test, needs)
    return Test(
        id=TestId(file, named.cls, named.method),
        world_size=ranks,
        in_one_process=_is_in_one_process(test),
        devices=_devices(test, needs, ranks, devices),
        of_devices=DeviceNeeds.of_all(need.of_devices for need in needs),
        backend=next((need.backend for need in needs if need.backend), None),
        timeout=_timeout(test),
        has_ranks=ranks > 1 or isinstance(test, RankedTestCase),
        is_whole_world=hasattr(method, WHOLE_WORLD),
        together=_together(type(test), named.cls),
        skip=_known_skip(test, method),
        line=_line(test),
    )


def _describe_pytest(named: NamedTest, file: str, devices: int) -> Test:
    """A test that pytest runs; if unittest would run it, too, both may say what it needs."""
    from . import pytest_items

    item = pytest_items.describe(named.test, TestId(file, named.cls, named.method), devices)
    test_case = pytest_items.test_case(named.test.item)
    if test_case is None:
        return item
    case = describe(NamedTest(named.cls, named.method, test_case), file, devices)
    return replace(
        item,
        world_size=max(item.world_size, case.world_size),
        in_one_process=case.in_one_process,
        devices=max(item.devices, case.devices),
        of_devices=DeviceNeeds.of_all([item.of_devices, case.of_devices]),
        backend=item.backend or case.backend,
        timeout=item.timeout or case.timeout,
        has_ranks=item.has_ranks or case.has_ranks,
        is_whole_world=item.is_whole_world or case.is_whole_world,
        skip=case.skip if item.skip is None else item.skip,
        line=case.line or item.line,
    )


def _method(test: Any) -> Any:
    return getattr(test, getattr(test, "_testMethodName", ""), None)


def _world_size(test: Any, needs: tuple[Any, ...]) -> int:
    """The number of ranks that compute at once. If reading world_size raises, the test raises when it runs."""
    try:
        size = int(test.world_size)
        if size > 0:
            return size
        # One for each device.
        return max((need.world_size or need.devices for need in needs), default=1) or 1
    except Exception:
        return max((need.world_size for need in needs if need.world_size), default=1)


def _is_in_one_process(test: Any) -> bool:
    """Whether its ranks are threads, of which mostly one computes, or local tensors."""
    from torch_testing_ext._testing.bases.multi_threaded import MultiThreadedTestCase

    return isinstance(test, MultiThreadedTestCase) or bool(getattr(test, "is_local_tensor_enabled", False))


def _devices(test: Any, needs: tuple[Any, ...], ranks: int, available: int) -> int:
    """The number of accelerators that the test will use on a machine that has `available`.

    The number that it declares; and at least one per rank, if there are enough and it may use some without a
    declaration: it must not find those of another test.
    """
    from torch_testing_ext._testing.marks.needs import declared

    used = declared(needs, available)
    if not any(need.devices for need in needs):
        # PyTorch's own decorators leave this.
        marked = int(getattr(_method(test), "_min_gpus_required", 0) or 0)
        used = max(used, marked)
    # More than there are: the test would certainly skip.
    used = max(min(used, available), declared(_certain_needs_of(test), available))
    if ranks <= available and _may_use_accelerators(test, needs):
        used = max(used, ranks)
    return used


def _may_use_accelerators(test: Any, needs: tuple[Any, ...]) -> bool:
    """Whether a test may use accelerators although no decorator says how many."""
    from torch_testing_ext._testing.bases import ranked_test_case
    from torch_testing_ext.upstream import drop_in

    device_type = _device_type(test)
    if device_type:
        return device_type != "cpu"
    backends = {need.backend for need in needs if need.backend}
    if backends:
        return not backends <= _CPU_BACKENDS
    # PyTorch's tests in one process use accelerators without a declaration that could be read here.
    return isinstance(test, ranked_test_case.RankedTestCase) or drop_in.is_installed()


def _device_type(test: Any) -> str:
    """The type of device that the test's class names, as PyTorch's device-generic tests do; "" if it names none."""
    try:
        device = getattr(test, "device_type", None)
        if callable(device):
            device = device()
    except Exception:
        return ""
    return str(device or "").partition(":")[0]


def _certain_needs_of(test: Any) -> tuple[Any, ...]:
    """The needs without which the test skips, whatever its class overrides and other decorators do."""
    from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
    from torch_testing_ext._testing.marks.needs import certain_needs

    if isinstance(test, RankedTestCase) and test._decides_about_skips():
        return ()
    method = _method(test)
    return () if method is None else tuple(certain_needs(method))


def _timeout(test: Any) -> float | None:
    from torch_testing_ext._testing.bases import ranked_test_case
    from torch_testing_ext._testing.marks.settings_of_tests import timeout_of

    if not isinstance(test, unittest.TestCase):
        return None
    overrides = ranked_test_case.TIMEOUT_OVERRIDE if isinstance(test, ranked_test_case.RankedTestCase) else {}
    return timeout_of(test) or overrides.get(test._testMethodName)


def _together(cls: type, name: str) -> str:
    """The name of the class or module whose fixtures keep its tests in one process; "" if there are none."""
    module = sys.modules.get(cls.__module__)
    if any(hasattr(module, fixture) for fixture in _MODULE_FIXTURES):
        return cls.__module__
    for fixture in _FIXTURES:
        if _function(cls, fixture) is not _function(unittest.TestCase, fixture):
            return name
    return ""


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
    if not method:
        return 0
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code.co_firstlineno if code else 0
