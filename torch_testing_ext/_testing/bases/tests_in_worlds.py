"""Tests in ranks that run in a whole world instead: each rank in a fork, without communication, one after the other."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._collectives.worlds.world_views import HAS_NO_RANKS, not_in_world
from torch_testing_ext._machine.accelerators import set_rng_seed
from torch_testing_ext._testing.bases import ranked_test_case, whole_worlds
from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase, own_cleanups
from torch_testing_ext._testing.marks.needs import SKIP_BY_CODE, Skipped
from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD, faults_of_test
from torch_testing_ext.launch import RankEnding, environment

from .continuous import MultiProcContinuousTest
from .multi_process import MultiProcessTestCase, PipeToParent
from .multi_threaded import MultiThreadedTestCase

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
__tracebackhide__ = True

# Whoever overrides one of these starts ranks, or judges them, in a way of its own.
_OF_OTHER_RANKS = ("_start_processes", "_join_processes", "_check_return_codes", "run_test_with_threaded_pg")


HAS_FAULTS = "has faults, of which ranks without communication learn nothing"


def install() -> None:
    """Let all tests of this process that have ranks run in a whole world, as the settings say."""
    ranked_test_case.prepare_otherwise = prepare


def not_run(size: int, why: str) -> unittest.SkipTest:
    """The skip of a test that cannot run in a whole world. `why`: a verb with its object."""
    return unittest.SkipTest(not_in_world(size, why))


def require_ranks(test: unittest.TestCase | None, function: Any) -> None:
    """Skip a test that has no ranks. `test`: the case of unittest, if it is one."""
    size = environment.read_settings().world
    if size is not None and not isinstance(test, RankedTestCase) and not hasattr(function, WHOLE_WORLD):
        raise not_run(size, HAS_NO_RANKS)


class KeptAccount(launch.AccountWriter):
    """The account of a rank that is not started by a launcher: it keeps the exception."""

    def __init__(self) -> None:
        super().__init__(None)
        self._error: BaseException | None = None

    def failed(self, error: BaseException, assertion: bool, within: str = "", traceback: str | None = None) -> None:
        self._error = self._error or error
        super().failed(error, assertion, within, traceback)

    def raise_error(self) -> None:
        """Raise what has ended the test, if anything has."""
        if self._error is not None:
            raise self._error
        if self.account is not None and self.account.ending is RankEnding.SKIPPED:
            raise unittest.SkipTest(self.account.summary)


def run_in_world(
    body: Callable[[launch.RankContext], object], size: int, directory: Path, inherited: Any = None
) -> None:
    """Run a test as each rank of a world, and raise what is wrong with it. `inherited` is for its context."""

    def run(rank: int) -> None:
        account = KeptAccount()
        context = launch.RankContext(rank, size, directory, account, inherited=inherited)
        context.enter()
        # As in every rank of a test.
        set_rng_seed()
        try:
            body(context)
        except SystemExit as leaving:
            account.raise_error()
            skip = SKIP_BY_CODE.get(leaving.code) if isinstance(leaving.code, int) else None
            if skip is not None:
                raise Skipped(skip) from None
            raise RuntimeError(f"the test has exited with {leaving.code!r}") from None
        account.raise_error()

    whole_worlds.judge_ranks(whole_worlds.run_ranks(run, size, _TIMEOUT, is_test=True))


# In seconds, of each rank.
_TIMEOUT = 60.0


def prepare(test: RankedTestCase) -> None:
    """Before a test runs: let its set-up start no ranks, and its method run in a whole world."""
    size = environment.read_settings().world
    assert size is not None
    if test._overrides(*_OF_OTHER_RANKS):
        why = not_run(size, f"starts or judges its ranks itself: {type(test).__qualname__}")
    elif faults_of_test(test) is not None:
        why = not_run(size, HAS_FAULTS)
    else:
        why = None
    own = ExitStack()
    test.addCleanup(own.close)

    def nothing(*_: object, **__: object) -> None:
        """Stands for what would start ranks."""

    @functools.wraps(getattr(test, test._testMethodName))
    def run() -> None:
        __tracebackhide__ = True
        if why is not None:
            raise why
        # What the test itself needs: a class that wants a device for each rank needs none here.
        skip = RankedTestCase._known_skip(test)
        if skip is not None:
            raise Skipped(skip)
        directory = launch.new_directory(test.id())
        own.callback(launch.discard, directory)
        run_in_world(_body(test, size), size, directory)

    for name in ("_spawn_processes", "_spawn_threads", "_ensure_processes_spawned", "_start_task"):
        # An instance has its own; the class keeps what it has.
        setattr(test, name, nothing)
    setattr(test, test._testMethodName, run)


def _body(test: RankedTestCase, size: int) -> Callable[[launch.RankContext], object]:
    """Make the function that a rank of the test runs; in a fork, so the class may be changed."""
    cls: Any = type(test)
    name = test._testMethodName

    def continuous(context: launch.RankContext) -> None:
        cls.rank, cls.world_size = context.rank, size
        cls._init_pg(context.rank, size, str(context.directory / "store"))
        cls._run_test_given_id(test.id())

    def threaded(context: launch.RankContext) -> None:
        cls.world_size = size
        own = cls(name)
        own.rank = context.rank
        with own_cleanups(own):
            own.perThreadSetUp()
            own.addCleanup(own.perThreadTearDown)
            getattr(own, name)()

    def process(context: launch.RankContext) -> None:
        cls.world_size = size
        options: dict[str, Any] = test._options_of_run()  # type: ignore[attr-defined]
        cls._run(context.rank, name, str(context.directory / "store"), PipeToParent(context.account), **options)

    if isinstance(test, MultiProcContinuousTest):
        return continuous
    if isinstance(test, MultiThreadedTestCase):
        return threaded
    assert isinstance(test, MultiProcessTestCase)
    return process
