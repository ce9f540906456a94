"""The test case that all bases of this kit derive from: it compares tensors, seeds every test and restores state."""

import contextlib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import expecttest
import torch

from torch_testing_ext._machine.random_state import set_rng_seed
from torch_testing_ext._testing.bases.rank_accounts import call_test_method
from torch_testing_ext._testing.helpers import expectations
from torch_testing_ext._testing.helpers.contexts import disable_gc, set_warn_always_context
from torch_testing_ext._testing.helpers.equality import find_difference
from torch_testing_ext._testing.helpers.equality_rules import Rules
from torch_testing_ext._testing.marks.skips_at_run import check_slow_or_fast
from torch_testing_ext._torch import function_modes

# Keeps these frames out of unittest's tracebacks.
__unittest = True

# Untyped in torch.
_sparse_invariants: Any = torch.sparse.check_sparse_tensor_invariants

_ANSI_ESCAPE = re.compile(r"\x1b(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")


class TestCase(expecttest.TestCase):
    """A `unittest.TestCase` with an assertEqual for tensors and containers of them, and inline expectations."""

    maxDiff = None
    # unittest shows no difference between longer texts; we always show it.
    _diffThreshold = sys.maxsize

    # The minimum tolerances of every comparison in the class or test.
    precision: float = 0
    rel_tol: float = 0

    # In ranks that are processes: tells the parent which texts are expected.
    _recorder: expectations.ExpectationRecorder | None = None

    _default_dtype_check_enabled = False
    # Set by setUp; these defaults serve subclasses whose setUp does not call this one.
    _modes_before = 0
    _grad_before: bool | None = None
    _invariants_before: bool | None = None

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        super().__init__(method_name if methodName == "runTest" else methodName)

    # -- before and after each test

    def setUp(self) -> None:
        check_slow_or_fast(self)
        set_rng_seed()
        self._check_default_dtype()
        self._invariants_before = _sparse_invariants.is_enabled()
        _sparse_invariants.enable()
        self._grad_before = torch.is_grad_enabled()
        self._modes_before = function_modes.torch_function_modes()
        self._state_before = function_modes.torch_function_state()

    _callTestMethod = call_test_method

    def tearDown(self) -> None:
        if self._invariants_before is False:
            _sparse_invariants.disable()
        if self._grad_before is not None:
            torch.set_grad_enabled(self._grad_before)
            self._check_torch_function()
        self._check_default_dtype()

    def _check_default_dtype(self) -> None:
        dtype = torch.get_default_dtype()
        if self._default_dtype_check_enabled and dtype != torch.float:
            raise AssertionError(
                f"a test left {dtype} as the default dtype; use set_default_dtype(), which restores it"
            )

    def _check_torch_function(self) -> None:
        """Remove a leaked mode (a default device is one), which would change every later test, and fail this one."""
        leaked = function_modes.torch_function_modes() - self._modes_before
        for _ in range(leaked):
            function_modes.pop_torch_function_mode()
        if leaked:
            raise AssertionError(
                f"the test left {leaked} torch function mode(s) on (torch.set_default_device sets one)"
            )
        state = function_modes.torch_function_state()
        if state != self._state_before:
            function_modes.set_torch_function_state(self._state_before)
            raise AssertionError(f"the test left __torch_function__ in the state {state}; it was {self._state_before}")

    # -- equality

    def assertEqual(
        self,
        x: Any,
        y: Any,
        msg: str | Callable[[str], str] | None = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        equal_nan: bool = True,
        exact_dtype: bool = True,
        exact_device: bool = False,
        exact_layout: bool = False,
        exact_stride: bool = False,
        exact_is_coalesced: bool = False,
    ) -> None:
        """Fail if the two differ: tensors by value within tolerances, containers item by item, the rest by `==`.

        `msg` is appended to the description of the difference; a function takes that text and returns the message.
        """
        __tracebackhide__ = True
        rules = Rules(
            rtol=rtol,
            atol=atol,
            rtol_floor=self.rel_tol,
            atol_floor=self.precision,
            equal_nan=equal_nan,
            exact_dtype=exact_dtype,
            exact_device=exact_device,
            exact_layout=exact_layout,
            exact_stride=exact_stride,
            exact_is_coalesced=exact_is_coalesced,
        )
        difference = find_difference(x, y, rules)
        if difference is not None:
            raise self.failureException(self._compose_message(msg, difference))

    def _compose_message(self, msg: str | Callable[[str], str] | None, difference: str) -> str:
        if msg is None:
            return difference
        if callable(msg):
            return msg(difference)
        return f"{difference}\n{msg}" if self.longMessage else msg

    def assertNotEqual(  # type: ignore[override]
        self,
        x: Any,
        y: Any,
        msg: str | None = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Fail if assertEqual would not."""
        try:
            self.assertEqual(x, y, msg, atol=atol, rtol=rtol, **kwargs)
        except AssertionError:
            return
        raise self.failureException(self._formatMessage(msg, f"the two are equal but should differ: {x} and {y}"))

    def assertEqualIgnoreType(self, *args: Any, **kwargs: Any) -> None:
        self.assertEqual(*args, exact_dtype=False, **kwargs)

    def assertEqualBroadcasting(self, x: torch.Tensor, y: Any, *args: Any, **kwargs: Any) -> None:
        """Call assertEqual with `y` (a number, or a sequence of them) broadcast to the shape of `x`."""
        if not isinstance(y, torch.Tensor):
            y = torch.ones_like(x) * (torch.tensor(y) if isinstance(y, Iterable) else y)
        self.assertEqual(x, y, *args, **kwargs)

    def assertEqualTypeString(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.assertEqual(x.device, y.device)
        self.assertEqual(x.dtype, y.dtype)
        self.assertEqual(x.is_sparse, y.is_sparse)

    def assertObjectIn(self, obj: Any, iterable: Iterable[Any]) -> None:
        """Fail unless the very object is among the items: by identity, not by `==`."""
        if not any(item is obj for item in iterable):
            raise AssertionError("object not found in iterable")

    def assertGreaterAlmostEqual(
        self, first: Any, second: Any, places: int | None = None, msg: Any = None, delta: Any = None
    ) -> None:
        """Fail if `first` is less than `second` by more than `delta`, or by more than rounding to `places` hides."""
        if delta is not None and places is not None:
            raise TypeError("specify delta or places not both")
        if first >= second:
            return
        places = 7 if places is None else places
        difference = second - first
        if difference <= delta if delta is not None else round(difference, places) == 0:
            return
        within = f"{delta} delta" if delta is not None else f"{places} places"
        raise self.failureException(
            self._formatMessage(msg, f"{first} not greater than or equal to {second} within {within}")
        )

    # -- expected output

    def assertExpectedInline(
        self, actual: Any, expect: str, skip: int = 0, ignore_comments: bool = False, ignore_empty_lines: bool = False
    ) -> None:
        """Fail unless the text equals `expect`, a string literal in the test, which EXPECTTEST_ACCEPT=1 rewrites."""
        actual = clean_expected(actual, ignore_comments, ignore_empty_lines)
        expect = clean_expected(expect, ignore_comments, ignore_empty_lines)
        if self._recorder is not None:
            self._recorder.record(expectations.record_of_call(actual, expect, skip))
        if not expectations.accepting():
            super().assertExpectedInline(actual, expect, skip + 1)
        elif self._accepts_expected() and (
            why_not := expectations.accept(expectations.record_of_call(actual, expect, skip))
        ):
            self.fail(why_not)

    def assertExpected(self, s: str, subname: str | None = None) -> None:
        """Fail unless the text equals a file in `expect/` beside the test file; EXPECTTEST_ACCEPT=1 writes it.

        A test that calls this several times needs a `subname` for each call, which becomes part of the file's name.
        """
        file = expectations.file_of(self, subname)
        if self._recorder is not None:
            self._recorder.record(expectations.Record(str(file), expectations.WHOLE_FILE, 1, s, ""))
        if not expectations.accepting():
            self._compare_with(file, s)
        elif self._accepts_expected():
            expectations.write(file, s)

    def _compare_with(self, file: Path, text: str) -> None:
        expected = expectations.read_if_exists(file)
        if expected is None:
            raise self.failureException(f"{file} does not exist; EXPECTTEST_ACCEPT=1 writes it. Actual text:\n{text}")
        self.assertMultiLineEqual(text, expected, f"differs from {file}; EXPECTTEST_ACCEPT=1 rewrites it")

    def _accepts_expected(self) -> bool:
        """Whether this process may rewrite expectations in the test file. Of several ranks, only one may."""
        return True

    # -- warnings and logs

    def assertNotWarn(self, callable: Callable[[], Any], msg: str = "") -> None:
        with _all_warnings() as caught:
            callable()
        self.assertTrue(not caught, msg or f"it warned: {[str(warning.message) for warning in caught]}")

    @contextlib.contextmanager
    def assertWarnsOnceRegex(self, category: type[Warning], regex: str = "") -> Iterator[None]:
        """Fail unless the block warns; in it, torch repeats warnings that it otherwise gives once per process."""
        with _all_warnings() as caught:
            yield
        if not caught:
            self.fail("no warning caught")
        kinds = [type(warning.message) for warning in caught]
        self.assertTrue(
            category in kinds, f"no {category.__name__} among {[repr(warning.message) for warning in caught]}"
        )
        texts = [str(warning.message) for warning in caught]
        self.assertTrue(any(re.match(regex, text) for text in texts), f"{regex!r} matches none of {texts}")

    def assertLogs(self, logger: Any = None, level: Any = None) -> Any:
        """Do as unittest, with torch's logger as the default."""
        return super().assertLogs(logger or logging.getLogger("torch"), level)

    def assertNoLogs(self, logger: Any = None, level: Any = None) -> Any:
        return super().assertNoLogs(logger or logging.getLogger("torch"), level)

    def assertNoUnraisable(self, callable: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Fail if the call raises an exception that cannot propagate, such as one in a destructor."""
        caught: list[str] = []
        hook = sys.unraisablehook

        def catch(unraisable: Any) -> None:
            caught.append(repr(unraisable.exc_value))

        sys.unraisablehook = catch
        try:
            with disable_gc():
                callable(*args, **kwargs)
        finally:
            sys.unraisablehook = hook
        if caught:
            self.fail(f"raised exceptions that cannot propagate: {', '.join(caught)}")


@contextlib.contextmanager
def _all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught, set_warn_always_context(True):
        warnings.simplefilter("always")
        yield caught


def clean_expected(text: Any, ignore_comments: bool = False, ignore_empty_lines: bool = False) -> str:
    """Return the part of a text that assertExpectedInline compares: without colours and ignored lines."""
    text = _ANSI_ESCAPE.sub("", str(text))
    if ignore_comments:
        text = _without_lines(text, lambda line: line.startswith("#"))
    return _without_lines(text, lambda line: not line) if ignore_empty_lines else text


def _without_lines(text: str, unwanted: Callable[[str], bool]) -> str:
    return "\n".join(line for line in text.split("\n") if not unwanted(line.strip()))


class TestCaseBase(TestCase):
    """A TestCase under a second name, for classes that are made at run time and call its methods by that name."""


class NoTest:
    """A base for classes that pytest must not collect as tests, whatever their names."""

    __test__ = False
