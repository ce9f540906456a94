"""MultiProcessTestCase: a test method that runs once in each of `world_size` fresh processes.

In the parent the method is replaced by one that waits for the ranks and raises their common verdict.
In a rank only the method itself runs, with what it registered by addCleanup.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import shlex
import shutil
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torch_testing_ext import _expect, _seeds, _torch, launch
from torch_testing_ext._needs import TEST_SKIPS, Skipped, TestSkip, first_unmet
from torch_testing_ext._rank_process import RankProcess
from torch_testing_ext._test_case import clean_expected
from torch_testing_ext._timeouts import timeout_of
from torch_testing_ext.common_utils import TestCase, set_rng_seed
from torch_testing_ext.launch import settings, system

__unittest = True  # keeps these frames out of unittest's tracebacks: the message says it all
__rank_frame__ = True  # and out of the tracebacks of ranks

DEFAULT_WORLD_SIZE = 4
TIMEOUT_DEFAULT = float(os.getenv("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "300"))
TIMEOUT_OVERRIDE: dict[str, float] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}
# Fewer than this, and importing them in each rank costs less than the message about it.
_WORTH_TEACHING = 10


def get_timeout(test_id: str) -> float:
    """Seconds a test may take: its own, by the last part of its id, or the default."""
    return TIMEOUT_OVERRIDE.get(test_id.split(".")[-1], TIMEOUT_DEFAULT)


class RankError(RuntimeError):
    """A rank raised, crashed, hung or got lost. The message tells of all ranks."""

    outcome = launch.Outcome.ERROR


class RankFailure(AssertionError):
    """An assertion failed in a rank, or the ranks disagree. The message tells of all ranks."""

    outcome = launch.Outcome.FAILED


class Interrupted(Exception):
    """Ctrl-C while ranks were running. They have been ended."""


@contextmanager
def _plainly() -> Iterator[None]:
    """What the user can mend is said without a traceback of ours."""
    try:
        yield
    except (ValueError, launch.CannotStart) as error:
        raise error.with_traceback(None) from None


class MultiProcessTestCase(TestCase):
    MAIN_PROCESS_RANK = -1
    TEST_ERROR_EXIT_CODE = 10
    # A rank leaves without tearing down its gloo groups, which saves 10 ms a connection. For a test about that: False.
    fast_exit = True

    rank: int
    file_name: str
    _recorder: _expect.Recorder | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        launch.Named.of(cls)  # so that a server that is forked off from now on has it

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        name = method_name if methodName == "runTest" else methodName
        super().__init__(name)
        self._result: Any = None
        self._launched: launch.Run | None = None
        self._directory: Path | None = None
        self.processes: list[RankProcess] = []
        test = getattr(self, name, None)
        if test is not None:
            setattr(self, name, self.join_or_run(test))
        elif name != "runTest":
            raise ValueError(f"{type(self).__qualname__} has no test method {name!r}")

    # -- what subclasses may override

    @property
    def world_size(self) -> int:
        return DEFAULT_WORLD_SIZE

    @property
    def destroy_pg_upon_exit(self) -> bool:
        return True

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    def _current_test_name(self) -> str:
        return self.id().split(".")[-1]

    def _should_stop_test_suite(self) -> bool:
        return False

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        """The method that stands in for a test: in the parent it waits for the ranks, in a rank it runs the test."""

        @functools.wraps(fn)
        def wrapper(self: MultiProcessTestCase) -> None:
            if self.rank == self.MAIN_PROCESS_RANK:
                self._join_processes(fn)
            else:
                fn()

        return types.MethodType(wrapper, self)

    # -- the parent

    def run(self, result: Any = None) -> Any:
        self._result = result
        return super().run(result)

    def setUp(self) -> None:
        super().setUp()
        self.special_return_code_checks: dict[Any, int] = {}
        self.skip_return_code_checks: list[Any] = []
        self.processes = []
        self.rank = self.MAIN_PROCESS_RANK
        self.pid_to_pipe: dict[int, Any] = {}
        with _plainly():
            self._directory = launch.new_directory(self.id())
        self.addCleanup(self._end_ranks)  # also where setUp fails later on, or tearDown forgets super()
        self.file_name = str(self._directory / "store")

    def tearDown(self) -> None:
        super().tearDown()
        self._end_ranks()

    def _spawn_processes(self) -> None:
        """Start the ranks; skip at once where the test needs what this machine has not."""
        skip = first_unmet(getattr(self, self._testMethodName))
        if skip is not None:
            raise Skipped(skip)
        if self._directory is None:
            raise RankError(f"{type(self).__qualname__}.setUp() must call super().setUp() first")
        self._start_ranks(self._checked_world_size(), self._directory)

    def _checked_world_size(self) -> int:
        given = self.world_size
        try:
            size = int(given)
        except (TypeError, ValueError):
            size = 0
        if size < 1 or (size != given and not isinstance(given, str)):
            who = f"{type(self).__qualname__}.world_size"
            raise ValueError(f"{who} is {given!r}; it must be a number of ranks, 1 or more")
        return size

    def _start_ranks(self, world_size: int, directory: Path, environ: dict[str, str] | None = None) -> None:
        chosen = settings.read()
        job = launch.Job(
            body=launch.Named.of(_be_rank),
            subject=launch.Named.of(type(self)),
            world_size=world_size,
            directory=directory,
            surroundings=launch.Surroundings.here({**system.for_gloo(), **(environ or {})}),
            arguments={
                "test_name": self._current_test_name(),
                "file_name": self.file_name,
                "world_size": world_size,
                "seed": _seeds.SEED,
                "options": _accepted_by(self._run, {"fake_pg": getattr(self, "fake_pg", False)}),
                "patient": chosen.debug_rank is not None,
            },
            stream=chosen.stream,
            debug_rank=chosen.debug_rank,
        )
        with _plainly():
            self._launched = launch.launch(job)
        self.processes = [RankProcess(self._launched, rank) for rank in range(world_size)]

    def _join_processes(self, fn: Callable[[], Any]) -> None:
        __tracebackhide__ = True
        verdict = self._see_through(fn)
        self._raise(self._with_expectations(verdict))

    def _with_expectations(self, verdict: launch.Verdict) -> launch.Verdict:
        """Ranks that disagree about an assertExpectedInline fail; the source is rewritten here if it is to be."""
        assert self._launched is not None
        passed = verdict.outcome is launch.Outcome.PASSED
        disagreement = _expect.settle(self.file_name, self._launched.job.world_size)
        if not disagreement:
            return verdict
        if passed:
            return launch.Verdict(launch.Outcome.FAILED, f"{disagreement}\n\nTo run it alone:\n  {self._command()}")
        return launch.Verdict(verdict.outcome, f"{verdict.message}\n\n{disagreement}", verdict.culprit)

    def _see_through(self, fn: Callable[[], Any]) -> launch.Verdict:
        if self._launched is None:
            setup = f"{type(self).__qualname__}.setUp()"
            raise RankError(f"no ranks were started: {setup} must call self._spawn_processes()")
        verdict = self._watch(self._launched, fn, self._timeout())
        if verdict.outcome is launch.Outcome.TIMEOUT and settings.read().explain_hangs:
            return self._explain_hang(verdict, fn)
        return verdict

    def _timeout(self) -> float | None:
        return None if settings.read().debug_rank is not None else timeout_of(self) or get_timeout(self.id())

    def _watch(self, run: launch.Run, fn: Callable[[], Any], timeout: float | None) -> launch.Verdict:
        expected = launch.Expected(fn in self.skip_return_code_checks, self.special_return_code_checks.get(fn))
        try:
            outcome = launch.watch(run, timeout, expected)
        except KeyboardInterrupt:
            if not self._runs_under_unittest():
                raise
            self._interrupt()
        case = launch.Case(self._short_name(), self._command(), inspect.getsourcefile(type(self)) or "")
        verdict = launch.judge(outcome.reports, outcome.timed_out, case, expected)
        if verdict.outcome is launch.Outcome.PASSED:
            self._tell_of_leftovers(outcome.reports)
        return verdict

    def _interrupt(self) -> NoReturn:
        """End the run in good order, so that unittest prints its summary."""
        self._result.stop()
        self._result.interrupted = True
        raise Interrupted(f"{self._short_name()} was interrupted; its ranks have been ended") from None

    def _runs_under_unittest(self) -> bool:
        """Or under pytest, whose result object is none of unittest's."""
        return isinstance(self._result, unittest.TestResult)

    def _explain_hang(self, verdict: launch.Verdict, fn: Callable[[], Any]) -> launch.Verdict:
        """Run once more under TORCH_DISTRIBUTED_DEBUG=DETAIL, which checks that ranks agree before each collective."""
        assert self._launched is not None
        with suppress(OSError):
            os.unlink(self.file_name)  # or the ranks would meet those of the first run
        directory = self._launched.job.directory / "detail"
        directory.mkdir()
        self._start_ranks(self._launched.job.world_size, directory, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        second = self._watch(self._launched, fn, self._timeout())
        said = second.message or "it passed this time"
        heading = "Run again under TORCH_DISTRIBUTED_DEBUG=DETAIL:"
        return launch.Verdict(verdict.outcome, f"{verdict.message}\n\n{heading}\n{said}", verdict.culprit)

    def _raise(self, verdict: launch.Verdict) -> None:
        __tracebackhide__ = True
        match verdict.outcome:
            case launch.Outcome.PASSED:
                return
            case launch.Outcome.SKIPPED:
                raise Skipped(TestSkip(verdict.code or TEST_SKIPS["generic"].exit_code, verdict.message))
            case launch.Outcome.FAILED:
                raise RankFailure(verdict.message)
            case _:
                error = RankError(verdict.message)
                error.outcome = verdict.outcome
                raise error

    def _tell_of_leftovers(self, reports: tuple[launch.RankReport, ...]) -> None:
        for report in reports:
            if report.leftovers:
                left = "; ".join(report.leftovers)
                print(f"{self._short_name()}: rank {report.rank} left running (ended now): {left}", file=sys.stderr)

    def _end_ranks(self) -> None:
        """Whatever is left of this test: processes and files."""
        if self._launched is not None and self._launched.alive:
            launch.end(self._launched)
        self._launched = None
        self.processes = []
        if self._directory is not None and settings.read().logs is None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _short_name(self) -> str:
        return f"{type(self).__qualname__}.{self._testMethodName}"

    def _command(self) -> str:
        """The one command that runs just this test again, from here. A result that stands for another runner knows."""
        if (known := getattr(self._result, "command_of", None)) is not None:
            return known(self)
        file = inspect.getsourcefile(type(self)) or "?"
        with suppress(ValueError):
            file = os.path.relpath(file)
        if not self._runs_under_unittest():
            return f"python -m pytest {shlex.quote(f'{file}::{type(self).__qualname__}::{self._testMethodName}')}"
        if type(self).__module__ == "__main__":
            return f"python {shlex.quote(file)} {self._short_name()}"
        return f"python -m unittest {type(self).__module__}.{self._short_name()}"

    # -- a rank

    def assertExpectedInline(
        self,
        actual: Any,
        expect: str,
        skip: int = 0,
        ignore_comments: bool = False,
        ignore_empty_lines: bool = False,
    ) -> None:
        """As in TestCase; in a rank what is got goes to the parent too. See `_expect`."""
        if self.rank == self.MAIN_PROCESS_RANK:
            super().assertExpectedInline(actual, expect, skip + 1, ignore_comments, ignore_empty_lines)
            return
        actual = clean_expected(actual, ignore_comments, ignore_empty_lines)
        expect = clean_expected(expect, ignore_comments, ignore_empty_lines)
        if self._recorder is None:
            self._recorder = _expect.Recorder(self.file_name, self.rank)
        self._recorder.record(actual, expect, skip)
        if not _expect.accepting():
            super().assertExpectedInline(actual, expect, skip + 1)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, pipe)

    def run_test(self, test_name: str, pipe: Any) -> None:
        """Run the test method in this rank. `pipe` is the rank's report. Leaves by SystemExit where the test did not
        pass, so that an overriding `_run` goes no further."""
        set_rng_seed()
        try:
            with self._own_cleanups():
                getattr(self, test_name)()
        except unittest.SkipTest as skip:
            sys.exit(_report_skip(pipe, skip))
        except Exception as error:
            within = "".join(f"in subtest {described}: " for described in _subtests_of(error))
            pipe.failed(error, isinstance(error, self.failureException), within)
            sys.exit(self.TEST_ERROR_EXIT_CODE)
        if self.destroy_pg_upon_exit:
            self._leave_process_group()

    @contextmanager
    def _own_cleanups(self) -> Iterator[None]:
        """Run what the test registered with addCleanup, last first. The test's own error wins over theirs."""
        try:
            yield
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
            raise errors[0]

    @contextmanager
    def subTest(self, msg: Any = None, **params: Any) -> Iterator[None]:
        """In a rank a failing subtest ends the test and names its parameters: going on would leave the other ranks
        alone in the collectives that this one did not come to."""
        if getattr(self, "rank", self.MAIN_PROCESS_RANK) == self.MAIN_PROCESS_RANK:
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

    def _leave_process_group(self) -> None:
        if not dist.is_initialized() or (self.fast_exit and _torch.only_gloo()):
            return  # the process is about to end, and with it the group
        with suppress(AssertionError, ValueError):
            dist.destroy_process_group()


def _describe_subtest(msg: Any, params: dict[str, Any]) -> str:
    named = ", ".join(f"{name}={value!r}" for name, value in params.items())
    return " ".join(part for part in (f"[{msg}]" if msg is not None else "", f"({named})" if named else "") if part)


def _subtests_of(error: Exception) -> list[str]:
    """The subtests that an exception came through, outermost first. Kept beside the message: not every type's message
    can be changed, and somebody may yet look at it."""
    return error.__dict__.setdefault("_torch_testing_ext_subtests", [])


def _report_skip(report: launch.Report, skip: unittest.SkipTest) -> int:
    code = getattr(skip, "exit_code", TEST_SKIPS["generic"].exit_code)
    report.skipped(str(skip) or TEST_SKIPS["generic"].message, code)
    return code


def _accepted_by(run: Callable[..., None], options: dict[str, Any]) -> dict[str, Any]:
    """An overriding `_run` may lack **kwargs."""
    takes = inspect.signature(run).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return options
    return {name: value for name, value in options.items() if name in takes}


_SKIP_BY_CODE = {skip.exit_code: skip for skip in TEST_SKIPS.values()}


def _be_rank(
    cls: type[MultiProcessTestCase],
    rank: int,
    report: launch.Report,
    *,
    test_name: str,
    file_name: str,
    world_size: int,
    seed: int,
    options: dict[str, Any],
    patient: bool,
) -> None:
    """The body of a rank's process. What the parent can find out comes in the arguments: here every look-up copies
    the pages it touches, in each rank."""
    _seeds.SEED = seed  # a new interpreter has not seen --seed
    _prepare_rank(world_size, patient)
    had = len(sys.modules)
    try:
        cls._run(rank, test_name, file_name, report, **options)
    except unittest.SkipTest as skip:
        _report_skip(report, skip)
    except SystemExit as leaving:
        if report.account is None and leaving.code in _SKIP_BY_CODE:
            report.skipped(_SKIP_BY_CODE[leaving.code].message, leaving.code)
        raise
    else:
        report.passed(_imported_since(had) if rank == 0 else ())
    finally:
        _torch.end_compile_workers()


def _prepare_rank(world_size: int, patient: bool) -> None:
    set_rng_seed()
    threads = max(1, system.cores() // world_size)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()  # read once at import otherwise, before the fork
    if patient:
        _torch.wait_without_end()


def _imported_since(had: int) -> tuple[str, ...]:
    """From the end: to look at all names would copy the pages they are on."""
    latest = list(itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - had)))
    new = tuple(name for name in reversed(latest) if name.startswith("torch."))
    return new if len(new) >= _WORTH_TEACHING else ()
