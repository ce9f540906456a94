"""Tests that only pytest would run: functions, and methods of plain classes."""

import ast
import importlib.util
import inspect
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch_testing_ext._tests.source_files import source_tree

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


@dataclass(frozen=True)
class PytestStyleTest:
    """A test that pytest would collect and unittest does not."""

    # "" for a function.
    cls: str
    method: str
    line: int


@dataclass(frozen=True)
class PytestTest:
    """A test that pytest has collected, and runs."""

    # A pytest_collection.Collection.
    collection: Any
    item: Any
    # What it is in, such as `Outer::Inner`; "" for nothing but its file.
    cls: str
    # Its name, with those of its parameters.
    method: str
    line: int
    # Names the fixtures that it shares with others.
    together: str


# The marks of pytest itself that decide how a test ends, or whether it runs.
_DECISIVE = (
    "skip",
    "skipif",
    "xfail",
    "parametrize",
    "usefixtures",
    "filterwarnings",
    "world_size",
    "standalone",
    "layouts",
)


def is_installed() -> bool:
    return importlib.util.find_spec("pytest") is not None


def marks_that_decide(test: Any) -> list[str]:
    """The names of the marks of pytest that a test of unittest has, and that unittest does not heed."""
    # Not imported, or not installed.
    if sys.modules.get("pytest") is None:
        return []
    cls = type(test)
    method = getattr(cls, getattr(test, "_testMethodName", ""), None)
    module = sys.modules.get(cls.__module__)
    names = set()
    for owner in (method, cls, module):
        marks = getattr(owner, "pytestmark", None) or ()
        for mark in marks if isinstance(marks, (list, tuple)) else (marks,):
            names.add(str(getattr(mark, "name", "")))
    return sorted(names.intersection(_DECISIVE))


IsFixture = Callable[[FunctionType], bool]


def pytest_style_tests(
    module: ModuleType, collected: Iterable[Any], is_fixture: IsFixture = lambda function: False
) -> list[PytestStyleTest]:
    """Find the tests for pytest that a module defines. `collected`: the tests that unittest has found in it.

    `is_fixture`: of old versions of pytest, whose fixtures are functions.
    """
    if _is_excluded(module):
        return []
    return list(_Finder(module, list(collected), is_fixture).tests())


def why_not_run(test: PytestStyleTest) -> str:
    kind = f"a method of {test.cls}, which is not a unittest.TestCase" if test.cls else "a function"
    return f"not run: {test.method} is {kind}: unittest does not run it"


def if_no_test(test: PytestStyleTest) -> str:
    """The advice for a test that pytest should not run, either."""
    return f"If it is no test, give it another name or set {test.cls or test.method}.__test__ = False."


class _Finder:
    """Finds the tests of one module."""

    def __init__(self, module: ModuleType, collected: list[Any], is_fixture: IsFixture):
        self._module = module
        self._is_fixture = is_fixture
        self._names_in_source: frozenset[str] | None = None
        cases = [thing for thing in vars(module).values() if _is_test_case(thing)]
        # A mixin's methods are tests of the classes that have it as a base.
        self._bases: set[type] = set()
        for cls in (*map(type, collected), *cases):
            self._bases.update(cls.__mro__)
        # The identities of the functions.
        self._run_by_unittest: set[int] = set()
        for test in collected:
            self._run_by_unittest.update(map(id, _functions_of(test)))

    def tests(self) -> Iterator[PytestStyleTest]:
        for name, thing in list(vars(self._module).items()):
            if isinstance(thing, FunctionType):
                if self._is_test_function(name, thing) and self._is_defined_here(name, thing):
                    yield PytestStyleTest("", name, _line(thing))
            elif isinstance(thing, type) and self._is_test_class(name, thing) and self._is_defined_here(name, thing):
                yield from self._methods(name, thing)

    def _is_test_function(self, name: str, function: FunctionType) -> bool:
        return (
            _looks_like(name, "test", function)
            and not _is_excluded(function)
            and not self._is_fixture(function)
            # Otherwise it is there for a class.
            and not _first_argument_is_self(function)
            and self._run_by_unittest.isdisjoint(map(id, _unwrapped(function)))
        )

    def _is_test_class(self, name: str, cls: type) -> bool:
        return (
            _looks_like(name, "Test", cls)
            and not _is_excluded(cls)
            and not _is_test_case(cls)
            and cls not in self._bases
            and all(getattr(cls, name) is getattr(object, name) for name in ("__init__", "__new__"))
        )

    def _methods(self, name: str, cls: type) -> Iterator[PytestStyleTest]:
        attributes: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            attributes.update(vars(base))
        for attribute, thing in attributes.items():
            function = thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing
            if isinstance(function, FunctionType):
                if self._is_test_method(attribute, function):
                    yield PytestStyleTest(name, attribute, _line(function))
            elif isinstance(function, type) and self._is_test_class(attribute, function):
                yield from self._methods(f"{name}.{attribute}", function)

    def _is_test_method(self, name: str, function: FunctionType) -> bool:
        if not _looks_like(name, "test", function):
            return False
        return not _is_excluded(function) and not self._is_fixture(function)

    def _is_defined_here(self, name: str, thing: FunctionType | type) -> bool:
        """Decide by the module, or by the source: a decorator of another module may have replaced the function."""
        if thing.__module__ == self._module.__name__:
            return True
        if self._names_in_source is None:
            self._names_in_source = frozenset(_definitions(self._module))
        return name in self._names_in_source


def _is_test_case(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, unittest.TestCase)


def _looks_like(name: str, prefix: str, thing: Any) -> bool:
    return name.startswith(prefix) or getattr(thing, "__test__", None) is True


def _first_argument_is_self(function: FunctionType) -> bool:
    code = function.__code__
    return code.co_argcount > 0 and code.co_varnames[0] == "self"


def _is_excluded(thing: Any) -> bool:
    return not getattr(thing, "__test__", True)


def _functions_of(test: Any) -> Iterator[Any]:
    """The functions that a test of unittest calls."""
    method = inspect.getattr_static(type(test), getattr(test, "_testMethodName", ""), None)
    for function in (method, getattr(test, "_testFunc", None)):
        yield from _unwrapped(function)


def _unwrapped(function: Any) -> Iterator[Any]:
    """A function, and the functions that its decorators have wrapped."""
    # The tests by identity: some callables have an `==` of their own. The list keeps them alive.
    seen: list[Any] = []
    while function is not None and not any(function is earlier for earlier in seen):
        seen.append(function)
        yield function
        inner = [getattr(function, name, None) for name in ("__wrapped__", "__func__", "func")]
        function = next(filter(callable, inner), None)


def _line(function: FunctionType) -> int:
    code: CodeType = getattr(inspect.unwrap(function), "__code__", function.__code__)
    return code.co_firstlineno


def _definitions(module: ModuleType) -> Iterator[str]:
    """The names of all functions and classes that a module's source defines outside of others."""
    tree = source_tree(module.__file__ or "")
    statements: list[ast.AST] = [tree] if tree is not None else []
    while statements:
        statement = statements.pop()
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
        else:
            statements.extend(child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.expr))
