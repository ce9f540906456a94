"""MultiThreadedTestCase: a test method that runs once in each of `world_size` threads of this process.

Threads start much faster than processes but are less realistic: they share Python's globals and one random number
generator, and communicate by copying. See `multi_threaded_pg`.
"""

from __future__ import annotations

import functools
import queue
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from torch_testing_ext import launch
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext._testing.bases.invocation import case_of
from torch_testing_ext._testing.bases.rank_accounts import account_for, refuse_what_ran_nothing
from torch_testing_ext._testing.bases.rank_verdicts import RankError, RankFailure, raise_verdict
from torch_testing_ext._testing.bases.ranked_test_case import DEFAULT_WORLD_SIZE, PARENT, RankedTestCase, own_cleanups
from torch_testing_ext._testing.bases.world_ranks import WorldBody, WorldRanks, why_not_in_world
from torch_testing_ext._testing.marks.needs import Skipped, TestSkip
from torch_testing_ext._testing.marks.settings_of_tests import kinds_on, may_differ
from torch_testing_ext._tests.source_files import source_file
from torch_testing_ext.launch import session
from torch_testing_ext.launch.attempts import Host, RankAttempt, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.session import Session
from torch_testing_ext.launch.watching.evidence import RankEvidence

if TYPE_CHECKING:
    from .threaded_ranks import ExcInfo, RankThreads


# Keeps these frames out of tracebacks.
__unittest = True
# Keeps them out of pytest's tracebacks.
__tracebackhide__ = True


def spawn_threads_and_init_comms(
    func: Any = None, timeout: float = ranked_test_case.TIMEOUT_DEFAULT, world_size: int = DEFAULT_WORLD_SIZE
) -> Any:
    """Decorator, with or without arguments: run a test method in `world_size` threads, each a rank of a process group.

    All threads share `self`. The timeout, in seconds, is for all of them together.
    """
    if func is None:
        return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        from .threaded_ranks import process_group

        def run_rank(rank: int) -> None:
            with process_group(rank, world_size, threads.ranks.store):
                func(self, *args, **kwargs)

        method = getattr(self, getattr(self, "_testMethodName", ""), None)
        plan = TestPlan(
            case_of(f"{type(self).__qualname__}.{func.__name__}", source_file(func)),
            world_size,
            timeout,
            launch.Expected(may_differ=may_differ(func, method, self)),
            kinds_on(func, method, type(self)),
        )
        threads = _Threads(run_rank)
        raise_verdict(session.run(threads, plan), self.id() if hasattr(self, "id") else "", self)

    return wrapper


class _Threads(Host):
    """Threads of this process, each a rank."""

    kind = HostKind.THREADS
    ranks: RankThreads

    def __init__(self, body: Callable[[int], None], test: MultiThreadedTestCase | None = None):
        self._body = body
        self._test = test

    def in_world(self, size: int) -> Host:
        if self._test is None:
            return self
        return WorldRanks(WorldBody(self._run_in_world), why_not_in_world(self._test))

    def _run_in_world(self, context: launch.RankContext) -> None:
        """Run the test as a rank of a whole world: in a fork, so the class may be changed."""
        assert self._test is not None
        cls: Any = type(self._test)
        cls.world_size = context.world_size
        own = cls(self._test._testMethodName)
        own.rank = context.rank
        with own_cleanups(own):
            own.perThreadSetUp()
            own.addCleanup(own.perThreadTearDown)
            getattr(own, own._testMethodName)()

    def refusal(self, what: str, why: str) -> Exception:
        text = f"{what}: {why}"
        return RankError(text) if self._test is None else self._test._error(text)

    def start(self, attempt: RankAttempt) -> None:
        from .threaded_ranks import RankThreads

        for _ in _queued_exceptions():
            # The exceptions are those of threads that have outlived their test.
            pass
        self.ranks = RankThreads(attempt.plan.world_size, self._body, account_for, attempt.sanitize)
        # If setUp fails later, nobody waits for them.
        attempt.resources.callback(self.ranks.end)
        if self._test is not None:
            self.ranks.test = self._test
            type(self._test).global_store = self.ranks.store
        self.ranks.start()

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        return self.ranks.join(attempt.timeout, attempt.expected, _queued_exceptions)


def _queued_exceptions() -> Iterator[tuple[int, ExcInfo]]:
    """Take the exceptions that overrides of run_test_with_threaded_pg have put into the queue, as PyTorch's does."""
    with suppress(queue.Empty):
        while True:
            yield MultiThreadedTestCase.exception_queue.get_nowait()


class FailedRanks(list["tuple[int, ExcInfo]"]):
    """The exceptions of the ranks of a test, and the verdict that follows from them."""

    def __init__(self, test: unittest.TestCase, ranks: RankThreads, verdict: launch.Verdict):
        super().__init__(sorted(ranks.errors.items()))
        hung = TimeoutError(verdict.message)
        if verdict.outcome is launch.TestOutcome.TIMEOUT:
            self.append((verdict.culprit or 0, (TimeoutError, hung, None)))
        self._complete = list(self)
        self.test = test
        self.verdict = verdict

    @property
    def is_complete(self) -> bool:
        """Whether no override has removed or added any."""
        return self._complete == list(self)


class MultiThreadedTestCase(RankedTestCase):
    """A test case whose test methods run in threads, one for each rank.

    `setUp` runs in the main thread and must call `_spawn_threads()`; each thread runs `perThreadSetUp`, the test and
    `perThreadTearDown`, on an instance of its own.
    """

    _DECIDES_ABOUT_SKIPS = (
        *RankedTestCase._DECIDES_ABOUT_SKIPS,
        *("_run", "run_test_with_threaded_pg", "perThreadSetUp", "perThreadTearDown"),
        *("join_or_run", "_join_threads", "_check_return_codes"),
    )

    MAIN_THREAD_RANK = PARENT
    _has_own_calls = False
    # An override of run_test_with_threaded_pg may put exceptions here: (rank, sys.exc_info()).
    exception_queue: ClassVar[queue.Queue[tuple[int, ExcInfo]]] = queue.Queue()
    # The store of the ranks' process group.
    global_store: Any = None
    # Set by setUp, in the main thread.
    threads: list[Any]
    _session: Session | None = None
    _skip: TestSkip | None = None

    # -- for subclasses to override

    @property
    def _current_test_name(self) -> str:
        return self.id().split(".")[-1]

    def _name_in_ranks(self) -> str:
        return self._current_test_name

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        """Return the method that replaces a test: in the main thread it waits for the ranks, in a rank it runs the
        test."""

        @functools.wraps(fn)
        def wrapper(self: MultiThreadedTestCase) -> None:
            if self.rank == self.MAIN_THREAD_RANK:
                if self._skip is not None:
                    raise Skipped(self._skip)
                if self._session is not None and self._session.host.kind is HostKind.WORLD:
                    raise_verdict(self._session.finish(), self.id(), self)
                else:
                    self._join_threads(self.threads, fn)
            else:
                refuse_what_ran_nothing(fn())

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
        """Start the ranks, unless it is certain that all would skip: then the test skips, like theirs, when it runs."""
        self._skip = self._skip_before_ranks()
        if self._skip is not None:
            return
        name, plan = self._current_test_name, self._plan()
        host = _Threads(lambda rank: self._run(name, rank, plan.world_size), self)
        own = self._session = Session(host, plan)
        self.addCleanup(own.close)
        own.begin()
        if own.host is host:
            self.threads = host.ranks.threads

    @classmethod
    def _join_threads(cls, threads: Sequence[Any], fn: Callable[[], Any]) -> None:
        started: RankThreads | None = getattr(threads[0], "ranks", None) if threads else None
        test = getattr(started, "test", None) or getattr(fn, "__self__", None)
        own: Session | None = getattr(test, "_session", None)
        if started is None or own is None:
            message = f"no ranks were started: {cls.__qualname__}.setUp() must call self._spawn_threads()"
            raise test._error(message) if isinstance(test, RankedTestCase) else RankError(message)
        assert isinstance(test, MultiThreadedTestCase)
        timeout = test._timeout()
        verdict = own.finish(launch.Expected(may_differ=test._collectives_may_differ()), timeout)
        cls._check_return_codes(FailedRanks(test, started, verdict), timeout, fn)

    @classmethod
    def _check_return_codes(
        cls, failed_ranks: Sequence[tuple[int, ExcInfo]], timeout: float | None, fn: Callable[[], Any]
    ) -> None:
        """Raise the exception for what the ranks raised. An override may judge that, or pass on a part of it."""
        if isinstance(failed_ranks, FailedRanks) and failed_ranks.is_complete:
            raise_verdict(failed_ranks.verdict, failed_ranks.test.id(), failed_ranks.test)
            return
        skips = []
        texts = []
        for rank, (_, error, _) in failed_ranks:
            if isinstance(error, unittest.SkipTest):
                skips.append(str(error))
            else:
                texts.append(f"rank {rank}:\n{launch.format_error(error)}")
        if texts:
            raise RankFailure("\n".join(texts))
        if skips:
            raise unittest.SkipTest(skips[0])

    # -- a rank

    @classmethod
    def _run(cls, test_name: str, rank: int, world_size: int, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.run_test_with_threaded_pg(test_name, rank, world_size)

    def run_test_with_threaded_pg(self, test_name: str, rank: int, world_size: int) -> None:
        """Run the test with its thread's set-up and tear-down. The first exception is the rank's error."""
        from .threaded_ranks import process_group

        with own_cleanups(self), process_group(rank, world_size, type(self).global_store):
            try:
                with own_cleanups(self):
                    self.perThreadSetUp()
                    getattr(self, test_name)()
            finally:
                # It runs without the group.
                self.addCleanup(self.perThreadTearDown)

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """assertEqual on one rank only: the threads share one random number generator, so the numbers that each draws
        depend on their timing."""
        if self.rank == rank:
            self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)
