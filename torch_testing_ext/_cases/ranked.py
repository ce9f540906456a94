"""The common base of tests that run in ranks, whether these are fresh processes, persistent processes or threads.

In the parent: the test's name, the command that runs it again, and the exceptions for the ranks' common verdict.
In a rank: only the test method runs, and the cleanups that it registers.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NoReturn

from torch_testing_ext import _torch, launch
from torch_testing_ext._asserts import expectations
from torch_testing_ext._marks.collectives import may_differ
from torch_testing_ext._marks.needs import TEST_SKIPS, Skipped, TestSkip, first_unmet, is_ours
from torch_testing_ext._marks.sanitizing import kinds_of_test
from torch_testing_ext._marks.timeouts import timeout_of
from torch_testing_ext._process import shell
from torch_testing_ext._process.files import source_file
from torch_testing_ext._process.user_warnings import warn_user
from torch_testing_ext._sanitizer.kinds import SanitizeKind
from torch_testing_ext.launch import settings
from torch_testing_ext.launch.job import Sanitize

from . import invocation
from .expected_imports import expected_imports
from .test_case import TestCase, clean_expected

__unittest = True  # keeps these frames out of unittest's tracebacks: the message is complete
__rank_frame__ = True  # and out of the tracebacks of ranks


def _number(text: str) -> float:
    """An int if it is one, as in PyTorch."""
    value = float(text)
    return int(value) if value.is_integer() else value


ERROR_CODE = 10  # the exit code of a rank whose test raised
PARENT = -1  # the `rank` of the test case that waits for the ranks
DEFAULT_WORLD_SIZE = 4
TIMEOUT_DEFAULT = _number(os.getenv("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "300"))
TIMEOUT_OVERRIDE: dict[str, float] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}


def get_timeout(test_id: str) -> float:
    """Return the timeout of a test in seconds: its own, by the last part of its id, or the default."""
    return TIMEOUT_OVERRIDE.get(test_id.split(".")[-1], TIMEOUT_DEFAULT)


# PyTorch's bases raise RuntimeError for an exception in a rank, even for a failed assertion, and AssertionError for an
# exit code. Ours derive from both, for tests that catch either. To unittest, a RankError is still an error: see below.
class RankError(RuntimeError, AssertionError):
    """A rank raised, crashed, hung or got lost. The message covers all ranks."""

    outcome = launch.Outcome.ERROR


class RankFailure(AssertionError, RuntimeError):
    """An assertion failed in a rank, or the ranks disagree. The message covers all ranks."""

    outcome = launch.Outcome.FAILED


class Interrupted(Exception):
    """Ctrl-C was pressed while ranks were running; they have been ended."""


@contextmanager
def without_our_traceback() -> Iterator[None]:
    """Hide our frames from errors that the user can fix."""
    try:
        yield
    except (ValueError, launch.CannotStart) as error:
        raise error.with_traceback(None) from None


class RankWarning(UserWarning):
    """Something that is to be known although the test passes."""


def say(text: str) -> None:
    """Warn the user; in pytest, which hides what a test that passes prints, by a warning of Python's, too."""
    warn_user(text)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        with suppress(RankWarning):  # a filter that makes warnings errors means those of the test
            warnings.warn_explicit(text, RankWarning, "torch_testing_ext", 1)


say_once = functools.cache(say)


def raise_verdict(test: unittest.TestCase | None, verdict: launch.Verdict) -> None:
    """Raise the exception for the verdict on `test`, or on ranks that have no test case, unless they passed."""
    __tracebackhide__ = True
    match verdict.outcome:
        case launch.Outcome.PASSED:
            if verdict.message:
                where = f"{test.id()}: " if test is not None else ""
                say(f"{where}{verdict.message}")
        case launch.Outcome.SKIPPED:
            raise Skipped(TestSkip(verdict.code or TEST_SKIPS["generic"].exit_code, verdict.message))
        case launch.Outcome.FAILED:
            raise RankFailure(verdict.message)
        case _:
            raise rank_error(test, verdict)


def rank_error(test: unittest.TestCase | None, verdict: launch.Verdict) -> RankError:
    error = RankError(verdict.message)
    error.outcome = verdict.outcome
    if test is not None and test.failureException is AssertionError:
        # To unittest, an exception that derives from this is a failure, any other an error.
        test.failureException = RankFailure
    return error


def checked_world_size(given: Any, name: str) -> int:
    """Convert a world size, a number or a string of digits, to a number; `name` is for the error."""
    try:
        size = int(given)
    except (TypeError, ValueError):
        size = 0
    if size < 1 or (size != given and not isinstance(given, str)):
        raise ValueError(f"{name} is {given!r}; it must be a number of ranks, 1 or more")
    return size


@functools.cache
def say_if_nothing_is_recorded() -> None:
    """Say once if the collectives of ranks cannot be compared."""
    if not _torch.has_flight_recorder():
        text = "torch records no collectives here (TORCH_FR_BUFFER_SIZE=0, or this torch has no flight recorder)"
        left_out = "mismatches are not found, and hangs last until the time-out"
        say(f"{text}: {left_out}")


@functools.cache
def why_not_sanitized() -> str | None:
    """Why the ranks of this process cannot be sanitized; None if they can. Says so once."""
    from torch_testing_ext._torch import hook

    why = hook.can_hook()
    if why is not None:
        left_out = "roots, reduce operations, splits, messages, buffers and numbers are not checked"
        say(f"nothing is sanitized: {why}: {left_out}")
    return why


def sanitize_with(kinds: Iterable[str]) -> Sanitize:
    """What the sanitizer does in the ranks of a test that names these kinds; nothing if ranks cannot be sanitized."""
    chosen = settings.read().for_ranks(kinds)
    return Sanitize() if chosen and why_not_sanitized() is not None else chosen


_NOT_OF_THREADS = (SanitizeKind.HASH,)  # they share the hash seed of their interpreter


def sanitize_threads(kinds: Iterable[str]) -> Sanitize:
    """What the sanitizer does in ranks that are threads. Says once what it does not."""
    chosen = settings.read().for_ranks(kinds)
    missing = [kind.value for kind in _NOT_OF_THREADS if kind in chosen.kinds]
    if missing:
        say_once(f"ranks that are threads are not checked for: {', '.join(missing)}")
    return chosen


class RankedTestCase(TestCase):
    """A test case whose test methods run in ranks; in the parent, each is replaced by one that waits for them."""

    # Who overrides one of these decides in the ranks, or from their ends, whether the test skips.
    _DECIDES_ABOUT_SKIPS: ClassVar[tuple[str, ...]] = ("_handle_test_skip",)

    rank: int
    _result: Any = None
    _recorder: expectations.ExpectationRecorder | None = None  # in ranks that are processes

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        name = method_name if methodName == "runTest" else methodName
        super().__init__(name)
        test = getattr(self, name, None)
        if test is not None:
            setattr(self, name, self._replacement_for(test))
        elif name != "runTest":
            raise ValueError(f"{type(self).__qualname__} has no test method {name!r}")

    def _replacement_for(self, test: Callable[[], Any]) -> Any:
        """Return the method that replaces a test: in the parent it waits for the ranks, in a rank it runs the test."""
        raise NotImplementedError

    def _is_rank(self) -> bool:
        return getattr(self, "rank", PARENT) != PARENT

    # -- the parent

    def run(self, result: Any = None) -> Any:
        self._result = result
        self._prepare_ranks()
        return super().run(result)

    def _prepare_ranks(self) -> None:
        """Called before the test's setUp."""

    def _fork_server_before_set_up(self, body: Callable[..., None]) -> None:
        """Let ranks have the state that this process has before setUp, not after it: new processes lack that too."""
        if launch.this_launch() is None and not self._is_rank() and not self._skips_without_set_up():
            subject = launch.Named.of(type(self))
            launch.prepare(launch.Named.of(body), subject, expected_imports(subject.file or ""))

    def _skips_without_set_up(self) -> bool:
        if getattr(type(self), "__unittest_skip__", False):
            return True
        if getattr(getattr(self, self._testMethodName, None), "__unittest_skip__", False):
            return True
        try:
            return self._known_skip() is not None
        except Exception:
            return True  # a need that reads what setUp has yet to set: it may skip

    def _known_skip(self) -> TestSkip | None:
        """The reason for which the ranks would all skip, if that is certain: then none need be started."""
        if self._decides_about_skips():
            return None
        return first_unmet(getattr(self, self._name_in_ranks(), None))

    def _name_in_ranks(self) -> str:
        """The name of the test method that the ranks run."""
        return str(self._testMethodName)

    @classmethod
    def _decides_about_skips(cls) -> bool:
        return cls._overrides(*cls._DECIDES_ABOUT_SKIPS)

    @classmethod
    def _overrides(cls, *names: str) -> bool:
        """Does the class have one of these from outside this package?"""
        found = (inspect.getattr_static(cls, name, None) for name in names)
        return any(one is not None and not is_ours(getattr(one, "__func__", one)) for one in found)

    def _error(self, message: str) -> RankError:
        return rank_error(self, launch.Verdict(launch.Outcome.ERROR, message))

    def _checked_world_size(self) -> int:
        return checked_world_size(self.world_size, f"{type(self).__qualname__}.world_size")  # type: ignore[attr-defined]

    def _interrupt(self) -> NoReturn:
        """Stop the run so that unittest still prints its summary."""
        self._result.stop()
        self._result.interrupted = True
        raise Interrupted(f"{self._short_name()} was interrupted; its ranks have been ended") from None

    def _runs_under_unittest(self) -> bool:
        """False under pytest, whose result object is not a unittest.TestResult."""
        return isinstance(self._result, unittest.TestResult)

    def _case(self) -> launch.Case:
        return launch.Case(self._short_name(), self._command(), source_file(type(self)))

    def _timeout(self) -> float | None:
        return None if settings.read().debug_rank is not None else timeout_of(self) or get_timeout(self.id())

    def _collectives_may_differ(self) -> bool:
        return may_differ(getattr(self, self._testMethodName, None), self)

    def _sanitize(self) -> Sanitize:
        """What the sanitizer does in the ranks of this test."""
        return sanitize_with(kinds_of_test(self))

    def _short_name(self) -> str:
        return f"{type(self).__qualname__}.{self._testMethodName}"

    def _command(self) -> str:
        """Return the command that runs just this test again. The result object of another runner knows its own."""
        if (command_of := getattr(self._result, "command_of", None)) is not None:
            return str(command_of(self))
        file = source_file(type(self)) or "?"
        with suppress(ValueError):
            file = os.path.relpath(file)
        if not self._runs_under_unittest():
            node = f"{file}::{type(self).__qualname__}::{self._testMethodName}"
            return shell.join(["python", "-m", "pytest", *invocation.pytest_arguments, node])
        if type(self).__module__ == "__main__":
            name = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None)  # of `python -m`
            main = ["-m", name] if name else [file]
            return shell.join(["python", *invocation.python_arguments, *main, self._short_name()])
        return shell.join(["python", "-m", "unittest", f"{type(self).__module__}.{self._short_name()}"])

    def _print_leftovers(self, reports: tuple[launch.RankReport, ...]) -> None:
        for report in reports:
            if report.leftovers:
                left = "; ".join(report.leftovers)
                print(
                    f"{self._short_name()}: rank {report.rank} left running (now terminated): {left}", file=sys.stderr
                )

    def _with_expectations(self, verdict: launch.Verdict, path: str, world_size: int) -> launch.Verdict:
        """Fail ranks that disagree about an expectation; when accepting, rewrite the source."""
        passed = verdict.outcome is launch.Outcome.PASSED
        disagreement = expectations.compare_ranks(path, world_size)
        if not disagreement:
            return verdict
        if passed:
            return launch.Verdict(launch.Outcome.FAILED, f"{disagreement}\n\nTo run it alone:\n  {self._command()}")
        return launch.Verdict(verdict.outcome, f"{verdict.message}\n\n{disagreement}", verdict.culprit)

    # -- a rank

    def assertExpectedInline(
        self,
        actual: Any,
        expect: str,
        skip: int = 0,
        ignore_comments: bool = False,
        ignore_empty_lines: bool = False,
    ) -> None:
        """As in TestCase; a rank that is a process also records its text for the parent, in `_recorder`."""
        if self._recorder is not None:
            got = clean_expected(actual, ignore_comments, ignore_empty_lines)
            wanted = clean_expected(expect, ignore_comments, ignore_empty_lines)
            self._recorder.record(expectations.record_of_call(got, wanted, skip))
        super().assertExpectedInline(actual, expect, skip + 1, ignore_comments, ignore_empty_lines)

    def assertExpected(self, s: str, subname: str | None = None) -> None:
        """As in TestCase; a rank that is a process also records its text for the parent, in `_recorder`."""
        if self._recorder is not None:
            file = str(expectations.file_of(self, subname))
            self._recorder.record(expectations.Record(file, expectations.WHOLE_FILE, 1, s, ""))
        super().assertExpected(s, subname)

    def _accepts_expected(self) -> bool:
        """The parent accepts for ranks that are processes; of ranks that are threads, rank 0 accepts."""
        return self._recorder is None and self.rank <= 0

    @contextmanager
    def _own_cleanups(self) -> Iterator[None]:
        """Run the cleanups of the test, last first. Its own error goes before theirs, and theirs before a skip."""
        try:
            yield
        except unittest.SkipTest:
            self._run_cleanups()
            raise
        except BaseException:
            with suppress(Exception):
                self._run_cleanups()
            raise
        self._run_cleanups()

    def _run_cleanups(self) -> None:
        errors = []
        registered: list[Any] = self._cleanups  # type: ignore[attr-defined]
        while registered:
            function, args, kwargs = registered.pop()
            try:
                function(*args, **kwargs)
            except Exception as error:
                errors.append(error)
        if errors:
            raise next((error for error in errors if not isinstance(error, unittest.SkipTest)), errors[0])

    @contextmanager
    def subTest(self, msg: Any = None, **params: Any) -> Iterator[None]:
        """In a rank, a failing subtest ends the test and names its parameters: if the rank went on, the other ranks
        would hang in the collectives that it skipped."""
        if not self._is_rank():
            with super().subTest(*([] if msg is None else [msg]), **params):
                yield
            return
        try:
            yield
        except unittest.SkipTest:
            pass
        except Exception as error:
            _subtests_of(error).insert(0, _describe_subtest(msg, params))
            raise


def _describe_subtest(msg: Any, params: dict[str, Any]) -> str:
    named = ", ".join(f"{name}={value!r}" for name, value in params.items())
    return " ".join(part for part in (f"[{msg}]" if msg is not None else "", f"({named})" if named else "") if part)


def _subtests_of(error: BaseException) -> list[str]:
    """The subtests in which an exception was raised, outermost first.

    They are an attribute and not part of the message: some types do not allow changes of theirs, and a test may still
    read the message.
    """
    subtests: list[str] = error.__dict__.setdefault("_torch_testing_ext_subtests", [])
    return subtests


# -- the account of a rank's end


def account_for_error(
    account: launch.AccountWriter, error: BaseException, failure: type[BaseException] = AssertionError
) -> None:
    """Record an exception with the subtests in which it was raised."""
    within = "".join(f"in subtest {described}: " for described in _subtests_of(error))
    account.failed(error, isinstance(error, failure), within)


def account_for_skip(account: launch.AccountWriter, skip: unittest.SkipTest) -> int:
    """Record a skip. Return the exit code that means the same."""
    code: int = getattr(skip, "exit_code", TEST_SKIPS["generic"].exit_code)
    account.skipped(str(skip) or TEST_SKIPS["generic"].message, code)
    return code


_SKIP_BY_CODE = {skip.exit_code: skip for skip in TEST_SKIPS.values()}


def account_for_exit(account: launch.AccountWriter, leaving: SystemExit, text: str | None = None) -> None:
    """Record a sys.exit(): with the exit code of a skip, it is a skip. `text`: the error that the rank reported."""
    if account.account is not None:
        return
    if leaving.code in _SKIP_BY_CODE:
        account.skipped(_SKIP_BY_CODE[leaving.code].message, leaving.code)
    elif leaving.code == ERROR_CODE and text is not None:
        account.failed_with((text.strip() or "an exception").splitlines()[-1], text)
    elif account.finished and not leaving.code:
        account.passed()  # an overriding `_run` may exit after its test


def account_for(account: launch.AccountWriter, error: BaseException) -> int:
    """Record an exception that the body of a rank raised. Return the exit code of a process that ends by it."""
    match error:
        case unittest.SkipTest():
            return account_for_skip(account, error)
        case SystemExit(code=code):
            account_for_exit(account, error)
            return code if isinstance(code, int) else int(code is not None)
        case _:
            account_for_error(account, error)
            return 0
