"""The exception that ends a test in a rank, as the account of that rank: here, and nowhere else."""

import functools
import inspect
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._testing.marks.needs import SKIP_BY_CODE, TEST_SKIPS
from torch_testing_ext.launch import ERROR_EXIT_CODE, rank_stops

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


@contextmanager
def recorded_account(
    account: launch.AccountWriter, failure: type[BaseException] = AssertionError, ends_process: bool = False
) -> Iterator[None]:
    """Record the exception that ends this block. Ctrl-C, and a sys.exit() that says nothing about the test, go on.

    `failure` is the type of a failed assertion. With `ends_process`, sys.exit() is not the end of a test of unittest,
    whose exit code may mean a skip, but of this process.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (ends_process and isinstance(error, SystemExit)):
            raise
        account_for(account, error, failure)
        if account.account is None:
            raise


def function_within(function: Any) -> Any:
    """The function that a decorated or partial one calls, which has a name and a file."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return inner


def refuse_to_run_nothing(function: Any) -> None:
    """Refuse a function whose call would run nothing of it: one that is `async def`, or contains `yield`."""
    inner = function_within(function)
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError(_RAN_NOTHING.format(getattr(inner, "__qualname__", inner), "would run"))


def refuse_what_ran_nothing(result: Any) -> None:
    """Refuse what a call has returned if that call ran nothing: coroutines, a generator, or a `map`."""
    if isinstance(result, (map, filter)):
        raise TypeError(f"{type(result).__name__}() ran nothing: make a list of it")
    results = result if isinstance(result, (list, tuple)) else [result]
    coroutines = [each for each in results if inspect.iscoroutine(each)]
    for each in coroutines:
        # Python warns of a coroutine that was neither awaited nor closed.
        each.close()
    if coroutines or inspect.isgenerator(result) or inspect.isasyncgen(result):
        name = coroutines[0].__qualname__ if coroutines else result.__qualname__
        raise TypeError(_RAN_NOTHING.format(name, "ran"))


def call_test_method(test: Any, method: Callable[[], object]) -> None:
    """Call the method of a test of unittest, which only warns of one that runs nothing."""
    run: Any = unittest.TestCase._callTestMethod  # type: ignore[attr-defined]
    if isinstance(test, unittest.IsolatedAsyncioTestCase):
        unittest.IsolatedAsyncioTestCase._callTestMethod(test, method)  # type: ignore[attr-defined]
        return
    result = method()
    refuse_what_ran_nothing(result)
    run(test, lambda: result)


_RAN_NOTHING = "{} {} nothing: it is `async def`, or contains `yield`. Run it with asyncio.run()"


def account_for(
    account: launch.AccountWriter, error: BaseException, failure: type[BaseException] = AssertionError
) -> int:
    """Record an exception that the body of a rank raised. Return the exit code of a process that ends by it."""
    match error:
        case unittest.SkipTest():
            return account_for_skip(account, str(error), getattr(error, "exit_code", None))
        case SystemExit(code=code):
            _account_for_exit(account, code)
            return code if isinstance(code, int) else int(code is not None)
        case _ if _is_skip_of_pytest(error):
            return account_for_skip(account, str(error))
        case _:
            account_for_error(account, error, failure)
            return ERROR_EXIT_CODE


def account_for_error(
    account: launch.AccountWriter, error: BaseException, failure: type[BaseException] = AssertionError
) -> None:
    """Record an exception, whatever its type, with the subtests in which it was raised."""
    stop_at_own(account, error)
    within = "".join(f"in subtest {described}: " for described in subtests_of(error))
    account.failed(error, isinstance(error, failure), within)


def stop_at_own(account: launch.AccountWriter, error: BaseException) -> None:
    """Let the user look at an exception that is the first of its rank, and the rank's own."""
    if account.account is None and launch.cause_of(error) is launch.Cause.OWN:
        rank_stops.at_failure(error)


def account_for_skip(account: launch.AccountWriter, reason: str, code: int | None = None) -> int:
    """Record a skip, and return its exit code: by default that of skips without a code of their own."""
    code = TEST_SKIPS["generic"].exit_code if code is None else code
    account.skipped(reason or TEST_SKIPS["generic"].message, code)
    return code


def _account_for_exit(account: launch.AccountWriter, code: Any) -> None:
    """Record a sys.exit() of a test: with the exit code of a skip, it is a skip."""
    if account.account is not None:
        return
    if code in SKIP_BY_CODE:
        account.skipped(SKIP_BY_CODE[code].message, code)
    elif code == ERROR_EXIT_CODE and account.sent_text is not None:
        account.failed_with((account.sent_text.strip() or "an exception").splitlines()[-1], account.sent_text)
    elif account.finished and not code:
        # An overriding `_run` may exit after its test.
        account.passed()


def may_skip(error: BaseException) -> bool:
    """Whether this exception can mean a skip. An exit can, by its code."""
    return isinstance(error, (unittest.SkipTest, SystemExit)) or _is_skip_of_pytest(error)


def _is_skip_of_pytest(error: BaseException) -> bool:
    pytest = sys.modules.get("pytest")
    return pytest is not None and isinstance(error, pytest.skip.Exception)


def subtests_of(error: BaseException) -> list[str]:
    """Return the subtests in which an exception was raised, outermost first.

    They are an attribute and not part of the message: some types do not allow changes of theirs, and a test may still
    read the message.
    """
    subtests: list[str] = error.__dict__.setdefault("_torch_testing_ext_subtests", [])
    return subtests
