"""A test suite that says when class and module fixtures run, and in which an exit of a fixture is a failure of it."""

import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


_unittest_case: Any = unittest.case


_unittest_suite: Any = unittest.suite


class FixtureSuite(unittest.TestSuite):
    """Runs tests like its base class. Subclasses learn which fixture runs.

    unittest calls a suite's fixture methods before each test, and each decides whether there is anything to do.
    """

    def fixture_began(self, name: str, owner: Any, result: Any) -> None:
        """A fixture begins: `setUpClass (module.T)`. `owner` is the class, or the name of the module."""

    def fixture_ended(self, name: str, result: Any) -> None:
        """The fixture has returned or raised."""

    # -- overriding unittest

    def _handleModuleFixture(self, test: Any, result: Any) -> None:
        module = type(test).__module__
        if module != self._previous_module(result):
            self._handleModuleTearDown(result)
            # What unittest would look up again to tear it down, although that has just been done.
            result._previousTestClass = None
        if module == self._previous_module(result) or not hasattr(sys.modules.get(module), "setUpModule"):
            self._base._handleModuleFixture(test, result)
            return
        with self._running(f"setUpModule ({module})", module, result) as caught:
            self._base._handleModuleFixture(test, result)
        if caught:
            result._moduleSetUpFailed = True

    def _handleModuleTearDown(self, result: Any) -> None:
        module = self._previous_module(result)
        own = hasattr(sys.modules.get(module or ""), "tearDownModule")
        if module is None or not (own or getattr(_unittest_case, "_module_cleanups", True)):
            self._base._handleModuleTearDown(result)
            return
        with self._running(f"tearDownModule ({module})", module, result):
            self._base._handleModuleTearDown(result)

    def _handleClassSetUp(self, test: Any, result: Any) -> None:
        cls = type(test)
        left_out = getattr(result, "_moduleSetUpFailed", False) or getattr(cls, "__unittest_skip__", False)
        if left_out or cls is getattr(result, "_previousTestClass", None) or not _overrides(cls, "setUpClass"):
            self._base._handleClassSetUp(test, result)
            return
        with self._running(f"setUpClass ({_name_of(cls)})", cls, result) as caught:
            self._base._handleClassSetUp(test, result)
        if caught:
            cls._classSetupFailed = True

    def _tearDownPreviousClass(self, test: Any, result: Any) -> None:
        cls: Any = getattr(result, "_previousTestClass", None)
        changes = cls is not None and cls is not type(test)
        if not changes or not (_overrides(cls, "tearDownClass") or getattr(cls, "_class_cleanups", False)):
            self._base._tearDownPreviousClass(test, result)
            return
        with self._running(f"tearDownClass ({_name_of(cls)})", cls, result):
            self._base._tearDownPreviousClass(test, result)

    @property
    def _base(self) -> Any:
        return super()

    def _previous_module(self, result: Any) -> str | None:
        module: str | None = self._get_previous_module(result)  # type: ignore[attr-defined]
        return module

    @contextmanager
    def _running(self, name: str, owner: Any, result: Any) -> Iterator[list[BaseException]]:
        """Report a fixture. Ctrl-C goes through; any other exception that unittest does not catch is its failure."""
        caught: list[BaseException] = []
        self.fixture_began(name, owner, result)
        try:
            yield caught
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            caught.append(error)
            result.addError(_unittest_suite._ErrorHolder(name), sys.exc_info())
        self.fixture_ended(name, result)


def prevented(test: unittest.TestCase, result: Any) -> bool:
    """Whether unittest leaves out this test, because its class or module fixture failed or skips."""
    return getattr(type(test), "_classSetupFailed", False) or getattr(result, "_moduleSetUpFailed", False)


def _overrides(cls: Any, name: str) -> bool:
    own = getattr(cls, name, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(unittest.TestCase, name).__func__


def _name_of(cls: type) -> str:
    # unittest writes the name of a class in this way.
    return f"{cls.__module__}.{cls.__qualname__}"
