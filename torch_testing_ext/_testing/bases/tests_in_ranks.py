"""The parts that all tests in ranks share: job, a rank's life, how an exception becomes a report, the verdict."""

import functools
import gc
import inspect
import itertools
import os
import sys
import threading
import traceback
import unittest
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.distributed as dist

# `_torch` comes first: it postpones the next full collection of garbage, which takes longer than all imports below.
from torch_testing_ext import (
    launch,
)
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._collectives.sanitizer_kinds import kinds_of, not_of_threads
from torch_testing_ext._machine import accelerators
from torch_testing_ext._process import files, system, user_shell
from torch_testing_ext._process.files import source_file
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.user_shell import UserTerminal, warn_user
from torch_testing_ext._testing.marks.needs import SKIP_BY_CODE, TEST_SKIPS, Skipped, TestSkip, first_unmet, is_ours
from torch_testing_ext._testing.marks.settings_of_tests import kinds_of_test, may_differ, timeout_of
from torch_testing_ext._torch import device_state, flight_recorder, process_state
from torch_testing_ext._torch.process_state import DYNAMO, INDUCTOR
from torch_testing_ext.launch import (
    ERROR_EXIT_CODE,
    AccountWriter,
    OwnWarning,
    RankAccount,
    RankContext,
    RankReport,
    environment,
    in_rank,
)
from torch_testing_ext.launch.in_rank import Sanitize
from torch_testing_ext.launch.own_report import pack_warning

from . import groups_and_devices
from .invocation import case_of_test
from .test_case import TestCase
from .unittest_and_pytest import facts_of

# --------------------------------------------------------------------------------------------------------------------
# The exception of a rank becomes the account of its end: here, and nowhere else.

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


def refuse_what_ran_nothing(result: object) -> None:
    """Refuse what a call has returned if that call ran nothing: a coroutine or a generator."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        name = result.__qualname__
        if inspect.iscoroutine(result):
            # Python warns of a coroutine that was neither awaited nor closed.
            result.close()
        raise TypeError(f"{name} ran nothing: it is `async def`, or contains `yield`. Run it with asyncio.run()")


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
        in_rank.at_failure(error)


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
    """Can this exception mean a skip? An exit can, by its code."""
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


# --------------------------------------------------------------------------------------------------------------------
# Warnings that another process has recorded for a test: they are raised once more in the process of pytest.
#
# A rank that is started for pytest records its own. As pytest does, it makes warnings of exceptions that have nobody
# to catch them, in threads and in finalizers: with a filter `error`, they fail the rank.


def warn_again_of_ranks(reports: Iterable[RankReport], filtered: bool = False) -> None:
    """Raise each different warning of some ranks once. `filtered`: see `raise_again`."""
    warn_again([report.account for report in reports], filtered)


def warn_again(accounts: Iterable[RankAccount | None], filtered: bool = False) -> None:
    """Raise each different warning in the accounts of some ranks once. `filtered`: see `raise_again`."""
    of_ranks: list[OwnWarning] = []
    for account in accounts:
        if account is not None:
            of_ranks += account.warnings
    raise_again(of_ranks, filtered)


def raise_again(packed: Iterable[OwnWarning], filtered: bool = False) -> None:
    """Raise each different warning once.

    The filters of the process that recorded it have let it pass. `filtered`: it may have others than this process has.
    """
    with warnings.catch_warnings():
        if not filtered:
            warnings.simplefilter("always")
        different = dict.fromkeys(OwnWarning(*warning) for warning in packed)
        for text, name, file, line in different:
            warnings.warn_explicit(_warning(name, text), None, file, line)


def _warning(name: str, text: str) -> Warning:
    module, _, cls = name.rpartition(".")
    category = getattr(sys.modules.get(module), cls, None)
    if isinstance(category, type) and issubclass(category, Warning):
        # The class may want other arguments.
        with suppress(Exception):
            warning = category(text)
            if str(warning) == text:
                return warning
    return UserWarning(f"{cls}: {text}")


# -- a rank


@contextmanager
def recorded_warnings(account: AccountWriter) -> Iterator[None]:
    """Add the warnings of this block to the account of a rank for pytest. Outside of it, they are in its output."""
    if "PYTEST_CURRENT_TEST" not in os.environ or "pytest" not in sys.modules:
        yield
        return
    with warnings.catch_warnings(record=True) as seen:
        try:
            with _uncaught_exceptions():
                yield
        finally:
            account.add(dict.fromkeys(map(pack_warning, seen)))


@contextmanager
def _uncaught_exceptions() -> Iterator[None]:
    """Make warnings of the exceptions that the hooks of the interpreter get, at the end of this block."""
    import pytest

    pending: list[tuple[Warning, str, int]] = []

    def on_thread(args: Any) -> None:
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread else None
            add(pytest.PytestUnhandledThreadExceptionWarning, f"Exception in thread {name}", args)

    def on_unraisable(args: Any) -> None:
        what = args.err_msg or "Exception ignored in"
        add(pytest.PytestUnraisableExceptionWarning, f"{what}: {args.object!r}", args)

    def add(category: type[Warning], title: str, args: Any) -> None:
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        warning = category(f"{title}\n\n{''.join(lines)}")
        file, line = "", 0
        for frame in traceback.extract_tb(args.exc_traceback)[-1:]:
            file, line = frame.filename, frame.lineno or 0
        pending.append((warning, file, line))

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = on_thread, on_unraisable
    try:
        yield
        # Only what the test has made: a forked rank does not look at the rest.
        if process_state.has_exempted_imported():
            gc.collect()
        while pending:
            warning, file, line = pending.pop(0)
            warnings.warn_explicit(warning, None, file, line)
    finally:
        threading.excepthook, sys.unraisablehook = before


# --------------------------------------------------------------------------------------------------------------------
# One life of a rank that is a process: prepare, announce, body, account, leave, wait for the peers.

# Its type stubs lack what comes from C++.
c10d: Any = dist
# Importing fewer modules than this in each rank costs less than a preload hint.
_WORTH_A_HINT = 10


def run_rank(
    context: RankContext,
    body: Callable[[], object],
    *,
    ends_process: bool = True,
    leaves_groups: bool = True,
    reports_imports: bool = False,
) -> None:
    """Run `body` as all there is to do in this rank, and account for how it ends.

    A body may write the account itself; returning without one means that it has passed. `ends_process` is false where
    sys.exit() ends only a test of unittest, whose exit code may mean a skip. `leaves_groups` is false where the body
    decides about the process groups that are left. With `reports_imports`, rank 0 says which modules of torch it had
    to import, so that later ranks can inherit them.
    """
    environment.set_variables_of_rank(context.rank, context.incarnation)
    prepare_rank(context)
    count = len(sys.modules)
    try:
        with recorded_account(context.account, ends_process=ends_process):
            in_rank.at_test()
            body()
            if context.account.account is None:
                if leaves_groups:
                    leave_process_group(context.fast_exit)
                context.account.passed(_imported_since(count) if reports_imports and context.rank == 0 else ())
    finally:
        if process_state.COMPILE_POOL in sys.modules:
            process_state.end_compile_workers()
        if context.group_creation is not None and context.group_creation.created:
            groups_and_devices.wait_for_peers()


def prepare_rank(context: RankContext) -> None:
    """Reset the state that a rank must not inherit, and let its peers know from now on while it creates groups."""
    if context.seed is not None:
        # A new interpreter has not seen --seed.
        accelerators.SEED = context.seed
    accelerators.set_rng_seed()
    is_set = "OMP_NUM_THREADS" in os.environ
    threads = torch.get_num_threads() if is_set else max(1, system.cores() // context.world_size)
    # Even to the same number: torch replaces a pool that was forked at its next use; in threads of autograd, it aborts.
    torch.set_num_threads(threads)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        # torch reads it only at import, which was before the fork.
        c10d.set_debug_level_from_env()
    device_state.stop_noting()
    groups_and_devices.prepare_shared_devices(context.rank, context.world_size)
    if context.is_debugged:
        process_state.wait_without_end()
    groups_and_devices.announce_creation(context)


def leave_process_group(fast: bool) -> None:
    """Destroy the process groups at a rank's end; with `fast`, leave gloo's groups to the end of the process."""
    if not dist.is_initialized() or (fast and process_state.only_gloo()):
        return
    groups_and_devices.wait_for_peers()
    with suppress(AssertionError, ValueError):
        dist.destroy_process_group()


def _imported_since(count: int) -> tuple[str, ...]:
    """Return the modules of torch imported since there were `count` modules, if they are worth a preload hint.

    Modules that code has made, such as inductor's kernels, have no spec, and nothing could import them.
    """
    # From the end: reading all names would copy the memory pages that hold them.
    added = max(0, len(sys.modules) - count)
    latest = itertools.islice(reversed(sys.modules), added)
    of_torch = [name for name in latest if name.startswith("torch.")]
    new = [name for name in of_torch if getattr(sys.modules[name], "__spec__", None)]
    return tuple(reversed(new)) if len(new) >= _WORTH_A_HINT else ()


# --------------------------------------------------------------------------------------------------------------------
# The verdict on ranks as this process tells it: an exception for a failure, a line on stderr for the rest.

# Keeps these frames out of tracebacks: the message is complete.


# PyTorch's bases raise RuntimeError for an exception in a rank, even for a failed assertion, and AssertionError for an
# exit code. Ours derive from both, for tests that catch either. To unittest, a RankError is still an error: see below.
class RankError(RuntimeError, AssertionError):
    """A rank raised, crashed, hung or got lost. The message covers all ranks."""

    outcome = launch.Outcome.ERROR
    cause_of_failure = launch.Cause.OWN
    # If it was judged.
    failure: FailureView | None = None

    @property
    def account(self) -> str:
        """All that is known of the failure, as a text."""
        return self.failure.account if self.failure is not None else ""


class RankFailure(AssertionError, RuntimeError):
    """An assertion failed in a rank, or the ranks disagree. The message covers all ranks."""

    outcome = launch.Outcome.FAILED
    cause_of_failure = launch.Cause.OWN
    failure: FailureView | None = None

    @property
    def account(self) -> str:
        """All that is known of the failure."""
        return self.failure.account if self.failure is not None else ""


for _public in (RankError, RankFailure):
    _public.__module__ = f"{__name__.partition('.')[0]}.common_distributed"


AnyError = TypeVar("AnyError", RankError, RankFailure)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Interrupted(Exception):
    """Ctrl-C was pressed while ranks were running; they have been ended."""


class RankWarning(UserWarning):
    """Something to know although the test passes."""


def rank_error(verdict: launch.Verdict, test: unittest.TestCase | None = None) -> RankError:
    """Make the exception for a verdict that is an error; `test` is the one that will raise it."""
    error = _with_account(RankError(verdict.message), verdict)
    if test is not None and test.failureException is AssertionError:
        # To unittest, an exception that derives from this is a failure, any other an error.
        test.failureException = RankFailure
    return error


def told_briefly(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let the function raise errors about ranks without our frames: their messages are complete.

    unittest shows all frames below the first one of a test file.
    """

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **options)
        except (launch.CannotStart, RankError) as error:
            raise error.with_traceback(None) from None

    return call


def raise_verdict(verdict: launch.Verdict, name: str = "", test: unittest.TestCase | None = None) -> None:
    """Raise the exception for the verdict on `test`, or on ranks that have no test case, unless they passed.

    `name` begins what is said of ranks that passed.
    """
    __tracebackhide__ = True
    match verdict.outcome:
        case launch.Outcome.PASSED:
            if verdict.message:
                show_to_user(f"{name}: {verdict.message}" if name else verdict.message)
        case launch.Outcome.SKIPPED:
            raise Skipped(TestSkip(verdict.code or TEST_SKIPS["generic"].exit_code, verdict.message))
        case launch.Outcome.FAILED:
            raise _with_account(RankFailure(verdict.message), verdict)
        case _:
            raise rank_error(verdict, test)


def _with_account(error: AnyError, verdict: launch.Verdict) -> AnyError:
    """Add what the verdict says to its exception. The account is kept in a file unless a runner keeps it."""
    if verdict.kept_as:
        files.keep_report(verdict.kept_as, verdict.account)
    error.outcome, error.cause_of_failure, error.failure = verdict.outcome, verdict.cause, verdict.failure
    return error


def print_leftovers(name: str, reports: Iterable[launch.RankReport]) -> None:
    """Name the processes that ranks have left running although the test passed."""
    for report in reports:
        if report.leftovers:
            left = "; ".join(report.leftovers)
            print(f"{name}: rank {report.rank} left running (now terminated): {left}", file=sys.stderr)


def show_to_user(text: str) -> None:
    """Warn the user; in pytest, which hides what a test that passes prints, by a warning of Python's, too."""
    warn_user(text)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        # A filter that makes warnings errors means those of the test.
        with suppress(RankWarning):
            warnings.warn_explicit(text, RankWarning, "torch_testing_ext", 1)


say_once = functools.cache(show_to_user)


# --------------------------------------------------------------------------------------------------------------------
# The checks that the ranks of a test get: collectives are compared, tensors and work are sanitized.

# They share the hash seed of their interpreter, and torch's hooks of optimizers.


@functools.cache
def say_if_nothing_is_recorded() -> None:
    """Say once if the collectives of ranks cannot be compared."""
    if not flight_recorder.has_flight_recorder():
        text = "torch records no collectives here (TORCH_FR_BUFFER_SIZE=0, or this torch has no flight recorder)"
        left_out = "mismatches are not found, and hangs last until the time-out"
        show_to_user(f"{text}: {left_out}")


@functools.cache
def why_not_sanitized() -> str | None:
    """Return the reason why the ranks of this process cannot be sanitized; None if they can. Says so once."""
    from torch_testing_ext._torch import operation_hook

    why = operation_hook.can_hook()
    if why is not None:
        left_out = "roots, reduce operations, splits, messages, buffers and numbers are not checked"
        show_to_user(f"nothing is sanitized: {why}: {left_out}")
    return why


def sanitize_with(kinds: Collection[str]) -> Sanitize:
    """Choose the sanitizer's checks for the ranks of a test that names these kinds; none if there can be none.

    Says once if their collectives cannot be compared.
    """
    say_if_nothing_is_recorded()
    chosen = environment.read_settings().for_ranks(kinds)
    return Sanitize() if chosen and why_not_sanitized() is not None else chosen


def sanitize_threads(kinds: Collection[str]) -> Sanitize:
    """Choose the sanitizer's checks for ranks that are threads. Says once which are left out, unless a header does."""
    settings = environment.read_settings()
    named = kinds_of(kinds)
    said = settings.sanitize - named if user_shell.has_header else frozenset()
    note = not_of_threads((settings.sanitize | named) - said)
    if note:
        say_once(note)
    return settings.for_ranks(kinds)


# --------------------------------------------------------------------------------------------------------------------
# The common base of tests that run in ranks, whether these are fresh processes, persistent processes or threads.
#
# In the parent: the test's name, its limits and checks, and the reason for which its ranks would all skip. In a rank:
# only the test method runs, and the cleanups that it registers.

# Keeps these frames out of tracebacks: the message is complete.


def _number(text: str) -> float:
    """Convert to an int if it is one, as in PyTorch."""
    value = float(text)
    return int(value) if value.is_integer() else value


# The `rank` of the test case that waits for the ranks.
PARENT = -1
DEFAULT_WORLD_SIZE = 4
# A wrong value fails each test when its ranks start: see launch/environment.py.
TIMEOUT_DEFAULT: float = 300
with suppress(ValueError):
    TIMEOUT_DEFAULT = _number(os.getenv(environment.DEFAULT_TIMEOUT, "300"))
TIMEOUT_OVERRIDE: dict[str, float] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}


def get_timeout(test_id: str) -> float:
    """Return the timeout of a test in seconds: its own, by the last part of its id, or the default."""
    return TIMEOUT_OVERRIDE.get(test_id.split(".")[-1], TIMEOUT_DEFAULT)


def checked_world_size(given: Any, name: str) -> int:
    """Convert a world size, a number or a string of digits, to a number; `name` is for the error."""
    try:
        size = int(given)
    except (TypeError, ValueError):
        size = 0
    if size < 1 or (size != given and not isinstance(given, str)):
        raise ValueError(f"{name} is {given!r}; it must be a number of ranks, 1 or more")
    if why := environment.too_many(size):
        raise ValueError(f"{name} is {size}; {why}")
    return size


# Where tests run in whole worlds: what to do before the set-up of each, in place of the preparation of its ranks.
prepare_otherwise: Callable[["RankedTestCase"], None] | None = None


class RankedTestCase(TestCase):
    """A test case whose test methods run in ranks; in the parent, each is replaced by one that waits for them."""

    # A subclass that overrides one of these decides itself, in the ranks or from their ends, whether the test skips.
    _DECIDES_ABOUT_SKIPS: ClassVar[tuple[str, ...]] = ("_handle_test_skip",)

    rank: int
    _result: Any = None

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
        return self.join_or_run(test)

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        return DEFAULT_WORLD_SIZE

    def _is_rank(self) -> bool:
        return getattr(self, "rank", PARENT) != PARENT

    # -- the parent

    def run(self, result: Any = None) -> Any:
        self._result = result
        (prepare_otherwise or type(self)._prepare_ranks)(self)
        return super().run(result)

    def _prepare_ranks(self) -> None:
        """Called before the test's setUp."""

    def _known_skip(self) -> TestSkip | None:
        """Return the skip of all ranks, if it is certain: then none need be started."""
        if self._decides_about_skips():
            return None
        return first_unmet(getattr(self, self._name_in_ranks(), None))

    def _name_in_ranks(self) -> str:
        return str(self._testMethodName)

    @classmethod
    def _decides_about_skips(cls) -> bool:
        return cls._overrides(*cls._DECIDES_ABOUT_SKIPS)

    @classmethod
    def _overrides(cls, *names: str) -> bool:
        """Does the class have one of these from outside this package?"""
        for name in names:
            member = inspect.getattr_static(cls, name, None)
            if member is not None and not is_ours(getattr(member, "__func__", member)):
                return True
        return False

    def _error(self, message: str) -> RankError:
        return rank_error(launch.Verdict(launch.Outcome.ERROR, message), self)

    def _checked_world_size(self) -> int:
        return checked_world_size(self.world_size, f"{type(self).__qualname__}.world_size")

    def _case(self) -> launch.Case:
        return case_of_test(self, self._result)

    def _timeout(self) -> float | None:
        return (
            None if environment.read_settings().debug_rank is not None else timeout_of(self) or get_timeout(self.id())
        )

    def _collectives_may_differ(self) -> bool:
        return may_differ(getattr(self, self._testMethodName, None), self)

    def _sanitize(self) -> Sanitize:
        """Choose the sanitizer's checks for the ranks of this test."""
        return sanitize_with(kinds_of_test(self))

    def _short_name(self) -> str:
        return f"{type(self).__qualname__}.{self._testMethodName}"

    # -- a rank

    def _accepts_expected(self) -> bool:
        """The parent accepts for ranks that are processes; of ranks that are threads, rank 0 accepts."""
        return self._recorder is None and self.rank <= 0

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
            subtests_of(error).insert(0, _describe_subtest(msg, params))
            raise


def _describe_subtest(msg: Any, params: dict[str, Any]) -> str:
    parts = []
    if msg is not None:
        parts.append(f"[{msg}]")
    if params:
        values = ", ".join(f"{name}={value!r}" for name, value in params.items())
        parts.append(f"({values})")
    return " ".join(parts)


@contextmanager
def own_cleanups(test: unittest.TestCase, account: launch.AccountWriter | None = None) -> Iterator[None]:
    """Run the cleanups of a test, last first. The first error counts; a skip or an exit only where there is none.

    An error of the test itself is in its `account` before: a cleanup may end the process.
    """
    errors: list[BaseException] = []
    registered: list[Any] = test._cleanups  # type: ignore[attr-defined]
    try:
        yield
    except BaseException as error:
        errors.append(error)
        if account is not None and isinstance(error, Exception) and not may_skip(error):
            account_for_error(account, error, test.failureException)
    while registered:
        function, args, kwargs = registered.pop()
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if not may_skip(error)), errors[0])


# --------------------------------------------------------------------------------------------------------------------
# The job of a test for its ranks; and whole runs of ranks that no test case waits for.


def job_for_test(
    body: Callable[..., object],
    world_size: int,
    directory: Path,
    environ: Mapping[str, str],
    chosen: environment.Settings,
    subject: type | None = None,
    **others: Any,
) -> launch.Job:
    """Make the job of ranks that run `body` in the state of this process, with these variables besides its own.

    `subject` is the class of the test, which the body gets; `others` are further fields of the job.
    """
    terminal = UserTerminal.here()
    job = launch.Job(
        launch.Named.of(body),
        world_size,
        directory,
        launch.ProcessContext.here(environ),
        None if subject is None else launch.Named.of(subject),
        seed=accelerators.SEED,
        stream=chosen.stream,
        debug_rank=chosen.debug_rank,
        terminal=terminal,
        expects_stops=terminal.expects_stops(None if subject is None else source_file(subject)),
    )
    return replace(job, **others)


def run_to_end(
    case: launch.Case,
    world_size: int,
    timeout: float | None,
    start: Callable[[Callable[..., launch.Job]], launch.Run],
    expected: launch.Expected,
    sanitize: Collection[str] = (),
    masks: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Run ranks, raise their verdict unless they pass, and return what each has printed.

    `start(make_job)` starts them with the job that `make_job(body, ...)` makes. `sanitize`: kinds of checks. `masks`:
    variables that hide devices.
    """
    __tracebackhide__ = True
    chosen = environment.read_settings()
    checks = sanitize_with(sanitize)
    directory = launch.new_directory(case.name)
    try:
        with environment.leased_variables(world_size) as addresses:

            def make_job(body: Callable[..., object], **others: Any) -> launch.Job:
                environ = {**addresses, **masks}
                return job_for_test(body, world_size, directory, environ, chosen, sanitize=checks, **others)

            limit = None if chosen.debug_rank is not None else timeout or TIMEOUT_DEFAULT
            result = launch.watch(start(make_job), limit, expected)
        warn_again_of_ranks(result.reports)
        verdict = result.verdict(case)
        # A rank that is debugged has the terminal, and no file.
        outputs = tuple(text_of(directory / f"rank{rank}.log") for rank in range(world_size))
        if verdict.outcome is launch.Outcome.PASSED:
            for rank, output in enumerate(outputs):
                for line in output.splitlines():
                    print(f"[rank{rank}] {line}")
            print_leftovers(case.name, result.reports)
    finally:
        launch.discard(directory)
    raise_verdict(verdict)
    return outputs


@functools.cache
def expected_imports(file: str) -> tuple[str, ...]:
    """Return the modules that the ranks of a test file will import by themselves, told by the names in the file.

    Without this, each rank of the first test imports them, which takes seconds, and the fork server once more.
    """
    facts = facts_of(file)
    if not facts.dynamo:
        return ()
    return (DYNAMO, INDUCTOR) if facts.inductor else (DYNAMO,)
