"""MultiThreadedTestCase: a test method that runs once in each of `world_size` threads of this process.

Threads start much faster than processes but are less realistic: they share Python's globals and one random number
generator, and communicate by copying. See `multi_threaded_pg`.
"""

from __future__ import annotations

import functools
import inspect
import types
import unittest
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._marks.needs import Skipped, first_unmet
from torch_testing_ext._threads.ranks import RankThreads
from torch_testing_ext.launch import settings

from . import ranked
from .ranked import DEFAULT_WORLD_SIZE, PARENT, RankedTestCase, RankError, account_for, raise_verdict

__unittest = True  # keeps these frames out of unittest's tracebacks
__rank_frame__ = True  # and out of the tracebacks of ranks


def spawn_threads_and_init_comms(
    func: Any = None, timeout: float = ranked.TIMEOUT_DEFAULT, world_size: int = DEFAULT_WORLD_SIZE
) -> Any:
    """Decorator, with or without arguments: run a test method in `world_size` threads, each a rank of a process group.

    All threads share `self`. The timeout, in seconds, is for all of them together.
    """
    if func is None:
        return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        threads = RankThreads(world_size, lambda rank: func(self, *args, **kwargs), account_for)
        case = launch.Case(f"{type(self).__qualname__}.{func.__name__}", file=inspect.getsourcefile(func) or "")
        _raise_outcome(threads, timeout, case)

    return wrapper


def _raise_outcome(threads: RankThreads, timeout: float | None, case: launch.Case) -> None:
    __tracebackhide__ = True
    patient = settings.read().debug_rank is not None
    reports, timed_out = threads.join(None if patient else timeout)
    raise_verdict(launch.judge(reports, timed_out, case))


class MultiThreadedTestCase(RankedTestCase):
    """A test case whose test methods run in threads, one for each rank.

    `setUp` runs in the main thread and must call `_spawn_threads()`; each thread runs `perThreadSetUp`, the test and
    `perThreadTearDown`, on an instance of its own.
    """

    MAIN_THREAD_RANK = PARENT

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        super().__init__(method_name, methodName)
        self.threads: list[Any] = []
        self._started: RankThreads | None = None

    def _replacement_for(self, test: Callable[[], Any]) -> Any:
        return self.join_or_run(test)

    # -- for subclasses to override

    @property
    def world_size(self) -> int:
        return DEFAULT_WORLD_SIZE

    @property
    def _current_test_name(self) -> str:
        return self.id().split(".")[-1]

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        """Return the method that replaces a test: in the main thread it waits for the ranks, in a rank it runs the
        test."""

        @functools.wraps(fn)
        def wrapper(self: MultiThreadedTestCase) -> None:
            __tracebackhide__ = True
            if self.rank == self.MAIN_THREAD_RANK:
                self._join_threads()
            else:
                fn()

        return types.MethodType(wrapper, self)

    def perThreadSetUp(self) -> None: ...

    def perThreadTearDown(self) -> None: ...

    # -- the main thread

    def setUp(self) -> None:
        super().setUp()
        self.rank = self.MAIN_THREAD_RANK
        self.threads = []

    def tearDown(self) -> None:
        super().tearDown()
        self.threads = []

    def _spawn_threads(self) -> None:
        """Start the ranks; skip at once if this machine does not meet a need of the test."""
        skip = first_unmet(getattr(self, self._testMethodName))
        if skip is not None:
            raise Skipped(skip)
        size, name = self._checked_world_size(), self._current_test_name
        self._started = RankThreads(size, lambda rank: self._run(name, rank, size), account_for)
        self.addCleanup(self._started.end)  # if setUp fails later, _join_threads is never called
        self.threads = self._started.threads

    def _join_threads(self) -> None:
        __tracebackhide__ = True
        if self._started is None:
            raise RankError(f"no ranks were started: {type(self).__qualname__}.setUp() must call self._spawn_threads()")
        _raise_outcome(self._started, self._timeout(), self._case())

    # -- a rank

    @classmethod
    def _run(cls, test_name: str, rank: int, world_size: int, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.run_test_with_threaded_pg(test_name, rank, world_size)

    def run_test_with_threaded_pg(self, test_name: str, rank: int, world_size: int) -> None:
        """Run the test with its thread's set-up and tear-down. The first exception is the rank's error."""
        try:
            self.perThreadSetUp()
            with self._own_cleanups():
                getattr(self, test_name)()
        except unittest.SkipTest:
            self.perThreadTearDown()
            raise
        except BaseException:
            with suppress(Exception):
                self.perThreadTearDown()
            raise
        self.perThreadTearDown()

    def _accepts_expected(self) -> bool:
        return not self._is_rank() or self.rank == 0

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """assertEqual on one rank only: the threads share one random number generator, so the numbers that each draws
        depend on their timing."""
        if self.rank == rank:
            self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)
