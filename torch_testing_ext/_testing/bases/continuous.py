"""MultiProcContinuousTest: the tests of a class run one after another in ranks that they share.

The ranks are forked like any others and create their process group once. Fresh ranks replace them when their state
is in doubt: after a test that failed or left global state changed, or after every test if the class wants
isolation.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
import unittest
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._machine.backend_names import NCCL
from torch_testing_ext._machine.random_state import set_rng_seed
from torch_testing_ext._process.words import grouped, list_of
from torch_testing_ext._testing.bases import launched_ranks, rank_accounts
from torch_testing_ext._testing.bases.process_ranks_test_case import ProcessRanksTestCase
from torch_testing_ext._testing.bases.rank_handles import RankProcess
from torch_testing_ext._testing.bases.rank_life import run_rank
from torch_testing_ext._testing.bases.rank_verdicts import RankError, raise_verdict, told_briefly
from torch_testing_ext._testing.bases.ranked_test_case import PARENT, checked_world_size, own_cleanups
from torch_testing_ext._testing.bases.world_ranks import WorldBody, WorldRanks, why_not_in_world
from torch_testing_ext._testing.helpers import expectations
from torch_testing_ext._testing.marks.needs import Skipped, most_needed
from torch_testing_ext._testing.marks.settings_of_tests import kinds_on
from torch_testing_ext.launch import accounts
from torch_testing_ext.launch.aspects import warnings_in_rank
from torch_testing_ext.launch.attempts import Host, RankAttempt, RanksEnd, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.watching.evidence import RankEvidence

if TYPE_CHECKING:
    from torch_testing_ext.launch.kept_ranks import KeptRanks
    from torch_testing_ext.launch.tasks_of_ranks import Task
from torch_testing_ext._testing.bases.global_state import GlobalStateWarning, changes_of_state, snapshot

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


_FileStore: Any = dist.FileStore  # type: ignore[attr-defined, unused-ignore]  # from C++

UNSET = -2
_SHARES_DEVICES = tuple(name for name in NCCL if name != "nccl-legacy")
# Seconds for idle ranks to exit.
LEAVE_TIMEOUT = 10.0


class MultiProcContinuousTest(ProcessRanksTestCase):
    """A test case whose tests share ranks, which have a process group before the first test.

        class ReduceTest(MultiProcContinuousTest):
            world_size = 2

            def test_sum(self): ...

    `setUp` and `tearDown` run in the parent, the test methods in every rank. `world_size` defaults to the number of
    accelerators. With `isolated = True`, each test gets fresh ranks.
    """

    _DECIDES_ABOUT_SKIPS = (
        *ProcessRanksTestCase._DECIDES_ABOUT_SKIPS,
        *("_init_pg", "_run_test_given_id", "_worker_run_main_wait"),
    )

    world_size: Any = UNSET
    rank: int = UNSET
    rdvz_file: str | None = None
    # The time limit of the process group.
    timeout: timedelta = timedelta(seconds=120)
    # A class that sets it skips the rest of its tests.
    poison_pill: bool = False
    isolated: bool = False

    # Each class has its own.
    _kept: ClassVar[KeptRanks | None] = None
    # The account of the running test, in a rank, unless the class may judge it.
    _account: ClassVar[launch.AccountWriter | None] = None
    _failures_of_ranks: ClassVar[list[str]] = []
    _ends_by_cleanup: ClassVar[bool] = False
    processes: ClassVar[list[RankProcess]] = []
    # The prefix of the files of this test in the ranks.
    _files: Path | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        from torch_testing_ext.launch import tasks_of_ranks  # noqa: F401 (its ranks inherit the module)

        cls._kept, cls.processes = None, []
        cls._failures_of_ranks, cls._ends_by_cleanup = [], False

    # -- for subclasses to override

    @classmethod
    def backend_str(cls) -> str | None:
        """The group's backend; None for gloo together with the default backend of each device in use."""
        return None

    @classmethod
    def device_type(cls) -> Any:  # or a property, or a string
        return accelerators.accelerator_type() or "cpu"

    @classmethod
    def opts(cls, high_priority_stream: bool = False) -> Any:
        """Options of the group's backend."""
        return None

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        """In a rank: create the default group. A skip here skips all tests."""
        # A mesh chooses the rank's device by it.
        local_rank = launch.local_rank_of(rank)
        os.environ["LOCAL_RANK"] = str(local_rank)
        backend = cls.backend_str()
        if accelerators.need_accelerators(backend) and 0 < world_size <= accelerators.most_ranks():
            # Otherwise a class that forgets to select one has all its ranks on the first device.
            torch.accelerator.set_device_index(device_sharing.device_of(local_rank, accelerators.device_count()))
        dist.init_process_group(
            backend=backend,
            world_size=world_size,
            rank=rank,
            store=_FileStore(rdvz_file, world_size),
            pg_options=cls.opts(),
            timeout=cls.timeout,
        )
        cls.pg = dist.group.WORLD  # type: ignore[attr-defined]

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        name = test_id.rsplit(".", maxsplit=1)[-1]
        self = cls(name)
        self.rank = cls.rank
        self.world_size = cls.world_size
        set_rng_seed()
        with own_cleanups(self, cls._account):
            getattr(self, name)(**kwargs)

    def _replacement_for(self, test: Callable[[], Any]) -> Any:
        return self._worker_run_main_wait(test)

    def _worker_run_main_wait(self, fn: Callable[[], Any]) -> Any:
        @functools.wraps(fn)
        def wrapper(self: MultiProcContinuousTest, **kwargs: Any) -> None:
            if self._is_rank():
                rank_accounts.refuse_what_ran_nothing(fn(**kwargs))
            else:
                self._wait_for_ranks()

        return types.MethodType(wrapper, self)

    def _is_rank(self) -> bool:
        return self.rank not in (PARENT, UNSET)

    # -- the parent: a class

    @classmethod
    def tearDownClass(cls) -> None:
        try:
            cls._end_class()
        finally:
            super().tearDownClass()

    @classmethod
    def _end_class(cls) -> None:
        """Dismiss the ranks, and raise what went wrong in them after their tests had passed."""
        cls._ends_by_cleanup = False
        cls._dismiss_ranks()
        failures, cls._failures_of_ranks = cls._failures_of_ranks, []
        if failures:
            raise RankError("\n\n".join(failures))

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        """Start ranks for the first test that needs them, and replace ranks that are not complete."""
        if cls._kept is not None and not cls._kept.are_there:
            cls._dismiss_ranks()
        if cls._kept is None:
            cls.world_size = cls._checked_size()
            cls._spawn_processes(cls.world_size)

    @classmethod
    def _checked_size(cls) -> int:
        size = cls._get_world_size(cls._device_type())
        size = checked_world_size(size, f"{cls.__qualname__}.world_size")
        cls._check_backend()
        return size

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        if not cls._ends_by_cleanup:
            cls._ends_by_cleanup = True
            # A subclass's tearDownClass may raise, or not call super().
            cls.addClassCleanup(cls._end_class)
        from torch_testing_ext.launch.kept_ranks import KeptRanks

        def make_job(attempt: RankAttempt) -> launch.Job:
            cls.rdvz_file = str(attempt.directory / "store")
            return attempt.job(_run_rank, cls, arguments={"rdvz_file": cls.rdvz_file}, fast_exit=bool(cls.fast_exit))

        case, nodes = launch.Case(cls.__qualname__), cls._checked_nodes()
        plan = TestPlan(case, world_size, kinds=kinds_on(cls), keeps_port=True, nodes=nodes)
        kept = KeptRanks(cls.__qualname__)
        cls.processes = [RankProcess(run, rank) for run in [kept.start(plan, make_job)] for rank in range(world_size)]
        cls._kept = kept

    @classmethod
    def _get_world_size(cls, device_type: str) -> Any:
        declared = inspect.getattr_static(cls, "world_size")
        size = declared.__get__(object.__new__(cls)) if isinstance(declared, property) else cls.world_size
        if size != UNSET:
            return size
        devices = torch.get_device_module(device_type).device_count()
        if devices == 0:
            raise unittest.SkipTest(f"No {device_type} devices available")
        if device_sharing.ranks_per_device() > 1 and device_type == accelerators.accelerator_type():
            return accelerators.ranks_for(cls._devices_needed())
        return devices

    @classmethod
    def _devices_needed(cls) -> int:
        return most_needed(getattr(cls, name, None) for name in dir(cls))

    @classmethod
    def _device_type(cls) -> str:
        """`device_type` may be a class method, a property, or a plain string."""
        declared = inspect.getattr_static(cls, "device_type")
        if isinstance(declared, property):
            return str(declared.__get__(object.__new__(cls)))
        value = cls.device_type
        return str(value() if callable(value) else value)

    @classmethod
    def _backend(cls) -> str | None:
        return cls.backend_str() if callable(cls.backend_str) else cls.backend_str

    @classmethod
    def _let_ranks_share_devices(cls, world_size: int) -> None:
        """NCCL refuses several ranks on a device unless told otherwise; a class may have them and skip in its tests."""
        if cls._backend() in _SHARES_DEVICES and world_size > torch.accelerator.device_count():
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"

    @classmethod
    def _check_backend(cls) -> None:
        backend = cls._backend()
        if backend is not None and not dist.is_backend_available(backend):
            raise unittest.SkipTest(f"Backend '{backend}' is not available")

    @classmethod
    def _dismiss_ranks(cls) -> None:
        """Let the ranks exit. A rank that died after its tests had passed fails the class."""
        kept, cls._kept, cls.processes = cls._kept, None, []
        message = kept.dismiss() if kept is not None else ""
        if message:
            cls._failures_of_ranks.append(message)

    # -- the parent: a test

    @told_briefly
    def setUp(self) -> None:
        super().setUp()
        self.rank = self.MAIN_PROCESS_RANK
        if self.poison_pill:
            raise unittest.SkipTest(f"{type(self).__qualname__}.poison_pill is set")
        skip = self._skip_before_ranks()
        if skip is not None:
            raise Skipped(skip)
        if self._has_own_ranks():
            self._ensure_processes_spawned()
        self._start_task()

    def _checked_world_size(self) -> int:
        return self._checked_size()

    def _start_task(self) -> None:
        self._open_session(_Task(self)).begin()

    def _running_ranks(self) -> KeptRanks:
        if self._kept is None:
            raise self._error(f"no ranks were started: {type(self).__qualname__}.setUp() must call super().setUp()")
        return self._kept

    def _state_changes(self, reports: Sequence[launch.RankReport]) -> list[str]:
        """The changes of global state that the ranks have noted, as sentences."""
        accounts = [(report.rank, report.final_account) for report in reports]
        by_change = grouped((note, rank) for rank, account in accounts if account is not None for note in account.notes)
        begin = f"{self._short_name()} left global state changed in"
        return [
            f"{begin} {list_of(ranks)}: {change}; the next test gets fresh ranks" for change, ranks in by_change.items()
        ]

    def _wait_for_ranks(self) -> None:
        if self._session is None:
            raise self._error(f"no ranks were started: {type(self).__qualname__}.setUp() must call super().setUp()")
        verdict = self._session.finish(launch.Expected(may_differ=self._collectives_may_differ()), self._timeout())
        raise_verdict(verdict, self.id(), self)

    def _endless(self) -> float | None:
        """The time-out of collectives that counts as endless: no test waits for the one that it has not chosen."""
        inherited = self.timeout is MultiProcContinuousTest.timeout
        return self.timeout.total_seconds() if inherited else None


class _Task(Host):
    """A test as a task of the ranks that its class keeps."""

    kind = HostKind.KEPT
    has_own_filters = True

    def __init__(self, test: MultiProcContinuousTest):
        self._test = test

    def in_world(self, size: int) -> Host:
        return WorldRanks(WorldBody(self._run_in_world), why_not_in_world(self._test))

    def _run_in_world(self, context: launch.RankContext) -> None:
        """Run the test as a rank of a whole world: in a fork, so the class may be changed."""
        cls = type(self._test)
        cls.rank, cls.world_size = context.rank, context.world_size
        cls._init_pg(context.rank, context.world_size, str(context.directory / "store"))
        cls._run_test_given_id(self._test.id())

    def in_place(self) -> Host:
        return _InPlace(self._test)

    def refusal(self, what: str, why: str) -> Exception:
        return self._test._error(f"{what}: {why}")

    def start(self, attempt: RankAttempt) -> None:
        test = self._test
        if not attempt.is_first:
            test._ensure_processes_spawned()
        kept = test._running_ranks()
        if SanitizeKind.HASH in attempt.sanitize.kinds and not kept.differ_in_hash:
            raise test._error("@sanitize('hash') must be on the class: its ranks start before the test")
        test._files = kept.begin(test.id(), attempt.sanitize)

    def watching(self) -> AbstractContextManager[None, bool | None]:
        return self._test._interruptible()

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        return self._test._running_ranks().watch(attempt.timeout, attempt.expected, self._test._endless())

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        """Compare expectations and global state, and dismiss ranks that are in doubt."""
        test = self._test
        end = test._with_expectations(end, str(test._files), len(end.reports))
        changes = test._state_changes(end.reports)
        if not test._running_ranks().are_there or changes or test.isolated:
            test._dismiss_ranks()
        if end.verdict.outcome is not launch.TestOutcome.PASSED:
            return end.with_note("\n\n".join(changes))
        for text in changes:
            warnings.warn(text, GlobalStateWarning, stacklevel=2)
        return end

    def release(self, attempt: RankAttempt) -> None:
        """End ranks that are still busy: if a subclass's setUp fails, the parent never waits for them."""
        kept = self._test._kept
        if kept is not None and kept.is_busy:
            kept.end()
            self._test._dismiss_ranks()


class _InPlace(launched_ranks.InPlace):
    """A test in the ranks of a launcher, with a group of its own: nothing replaces a process whose group has failed."""

    def __init__(self, test: MultiProcContinuousTest):
        super().__init__(self._run, test)
        self._class: type[MultiProcContinuousTest] = type(test)
        self._id = test.id()

    def judge(self, attempt: RankAttempt) -> RanksEnd:
        cls = self._class
        before = cls.rank, cls.world_size
        try:
            return super().judge(attempt)
        finally:
            cls.rank, cls.world_size = before

    def _run(self, context: launch.RankContext) -> None:
        cls = self._class
        cls.rank, cls.world_size = context.rank, context.world_size
        cls._let_ranks_share_devices(context.world_size)
        cls._init_pg(context.rank, context.world_size, str(context.directory / "store"))
        cls._run_test_given_id(self._id)


def _run_rank(context: launch.RankContext, cls: type[MultiProcContinuousTest], rdvz_file: str) -> None:
    from torch_testing_ext.launch.tasks_of_ranks import tasks

    def body() -> None:
        cls.rank, cls.world_size = context.rank, context.world_size
        cls._let_ranks_share_devices(context.world_size)
        cls._init_pg(context.rank, context.world_size, rdvz_file)
        for task in tasks(context.directory, context.rank):
            _run_task(cls, task)

    run_rank(context, body, ends_process=False)


launch.Named.of(_run_rank)


def _run_task(cls: type[MultiProcContinuousTest], task: Task) -> None:
    """Run one test, and note the global state that it changed."""
    cls._account = None if cls._overrides("_run_test_given_id") else task.account
    cls._recorder = expectations.ExpectationRecorder(str(task.path), cls.rank)
    before = snapshot()
    accounts.forget_memory_of_this_process()
    with rank_accounts.recorded_account(task.account, cls.failureException):
        with warnings_in_rank.recorded_warnings(task.account):
            cls._run_test_given_id(task.name)
        task.account.passed()
    if changes := changes_of_state(before, snapshot()):
        task.account.note(changes)
