"""MultiProcContinuousTest: persistent ranks, and state that tests leave changed."""

from __future__ import annotations

import functools
import inspect
import os
import types
import unittest
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._machine import accelerators, device_rules
from torch_testing_ext._machine.accelerators import set_rng_seed
from torch_testing_ext._machine.device_rules import NCCL
from torch_testing_ext._process.words import grouped, list_of
from torch_testing_ext._testing.bases import launched_ranks, rank_accounts
from torch_testing_ext._testing.bases.rank_life import run_rank
from torch_testing_ext._testing.bases.rank_verdicts import RankError, raise_verdict, told_briefly
from torch_testing_ext._testing.bases.ranked_test_case import PARENT, checked_world_size, own_cleanups
from torch_testing_ext._testing.helpers import expectations
from torch_testing_ext._testing.marks.needs import Skipped, most_needed
from torch_testing_ext._testing.marks.settings_of_tests import faults_of_test, first_plan, kinds_on
from torch_testing_ext.faults import FaultPlan, Sweep
from torch_testing_ext.launch import own_report
from torch_testing_ext.launch.aspects import rank_warnings
from torch_testing_ext.launch.aspects.output import print_leftovers
from torch_testing_ext.launch.aspects.sanitizer import sanitize_with

from .multi_process import ProcessRanksTestCase, RankProcess

if TYPE_CHECKING:
    from torch_testing_ext.launch.coordinator import Round
    from torch_testing_ext.launch.persistent_ranks import PersistentRanks, Task


# --------------------------------------------------------------------------------------------------------------------
# Global state that one test may leave changed for later tests in the same process.
#
# Random state does not count: every test uses it, and every test begins with the same seeds.

# Environment variables that torch itself sets when it first compiles something.
_SET_BY_TORCH = ("TORCHINDUCTOR_", "TRITON_", "KINETO_")


@dataclass(frozen=True)
class _Identity:
    """Compares an object by identity, and shows it without its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __repr__(self) -> str:
        return "none" if self.value is None else f"a {type(self.value).__name__}"


_GETTERS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "filling of uninitialized memory": lambda: getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "precision of float32 products": torch.get_float32_matmul_precision,
    "number of threads": torch.get_num_threads,
    "gradients enabled": torch.is_grad_enabled,
    "default process group": lambda: _Identity(dist.group.WORLD),
    "working directory": os.getcwd,
}

State = dict[str, Any]


class GlobalStateWarning(UserWarning):
    """A test left global state changed in a rank."""


def snapshot() -> State:
    """Read all state that this module watches."""
    environment = {
        f"os.environ[{name!r}]": value for name, value in os.environ.items() if not name.startswith(_SET_BY_TORCH)
    }
    return {**{name: get() for name, get in _GETTERS.items()}, **environment}


def changes_of_state(before: State, after: State) -> list[str]:
    """Describe each difference in one phrase."""
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {_show(before, name)} -> {_show(after, name)}"
        for name in names
        if before.get(name, _NOT_SET) != after.get(name, _NOT_SET)
    ]


_NOT_SET = object()


def _show(state: State, name: str) -> str:
    return repr(state[name]) if name in state else "not set"


# --------------------------------------------------------------------------------------------------------------------
# MultiProcContinuousTest: the tests of a class run one after another in persistent ranks.
#
# The ranks are forked like any others and create their process group once. Fresh ranks replace them when their state
# is in doubt: after a test that failed or left global state changed, or after every test if the class wants
# isolation.

__unittest = True  # keeps these frames out of tracebacks
__tracebackhide__ = True  # the same for pytest

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
    # Of the process group.
    timeout: timedelta = timedelta(seconds=120)
    # A class that sets it skips the rest of its tests.
    poison_pill: bool = False
    isolated: bool = False

    # Each class has its own.
    _persistent_ranks: ClassVar[PersistentRanks | None] = None
    # Of its ports.
    _leases: ClassVar[ExitStack]
    # Of the test, in a rank, unless the class may judge it.
    _account: ClassVar[launch.AccountWriter | None] = None
    _failures_of_ranks: ClassVar[list[str]] = []
    _ends_by_cleanup: ClassVar[bool] = False
    processes: ClassVar[list[RankProcess]] = []
    # The faults of this run of the test.
    _plan: FaultPlan | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        from torch_testing_ext.launch import persistent_ranks  # noqa: F401 (its ranks inherit the module)

        cls._persistent_ranks, cls.processes = None, []
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
        os.environ["LOCAL_RANK"] = str(rank)
        backend = cls.backend_str()
        if accelerators.need_accelerators(backend) and 0 < world_size <= accelerators.most_ranks():
            # Otherwise a class that forgets to select one has all its ranks on the first device.
            torch.accelerator.set_device_index(device_rules.device_of(rank, accelerators.device_count()))
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
        if cls._persistent_ranks is not None and not cls._persistent_ranks.is_complete():
            cls._dismiss_ranks()
        if cls._persistent_ranks is None:
            size = cls._get_world_size(cls._device_type())
            cls.world_size = checked_world_size(size, f"{cls.__qualname__}.world_size")
            cls._check_backend()
            cls._spawn_processes(cls.world_size)

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        if not cls._ends_by_cleanup:
            cls._ends_by_cleanup = True
            # A subclass's tearDownClass may raise, or not call super().
            cls.addClassCleanup(cls._end_class)
        from torch_testing_ext.launch.persistent_ranks import PersistentRanks

        directory = launch.new_directory(cls.__qualname__)
        cls.rdvz_file = str(directory / "store")
        with ExitStack() as leases:
            job = cls._job(
                _run_rank,
                world_size,
                directory,
                leases.callback,
                arguments={"rdvz_file": cls.rdvz_file},
                fast_exit=bool(cls.fast_exit),
                sanitize=sanitize_with(kinds_on(cls)),
            )
            cls._persistent_ranks = PersistentRanks(job)
            cls._leases = leases.pop_all()
        cls.processes = [RankProcess(cls._persistent_ranks.run, rank) for rank in range(world_size)]

    @classmethod
    def _get_world_size(cls, device_type: str) -> Any:
        declared = inspect.getattr_static(cls, "world_size")
        size = declared.__get__(object.__new__(cls)) if isinstance(declared, property) else cls.world_size
        if size != UNSET:
            return size
        devices = torch.get_device_module(device_type).device_count()
        if devices == 0:
            raise unittest.SkipTest(f"No {device_type} devices available")
        if device_rules.ranks_per_device() > 1 and device_type == accelerators.accelerator_type():
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
        ranks = cls._persistent_ranks
        if ranks is None:
            return
        cls._persistent_ranks, cls.processes = None, []
        if not ranks.is_over:
            end = ranks.dismiss(LEAVE_TIMEOUT)
            after = f"{cls.__qualname__} (after {ranks.last})" if ranks.last else cls.__qualname__
            print_leftovers(after, end.reports)
            verdict = end.verdict(launch.Case(after))
            if verdict.message:
                cls._failures_of_ranks.append(verdict.message)
        cls._leases.close()
        launch.discard(ranks.directory)

    # -- the parent: a test

    @told_briefly
    def setUp(self) -> None:
        super().setUp()
        self.rank = self.MAIN_PROCESS_RANK
        if self.poison_pill:
            raise unittest.SkipTest(f"{type(self).__qualname__}.poison_pill is set")
        skip = self._known_skip()
        if skip is not None:
            raise Skipped(skip)
        if launch.this_launch() is not None:
            self._begin_in_place()
            return
        self._ensure_processes_spawned()
        self._plan = first_plan(faults_of_test(self, restarts=False))
        self._start_task()

    def _begin_in_place(self) -> None:
        """A launcher has started this process as a rank: begin the test together with the others."""
        size = self._get_world_size(self._device_type())
        size = checked_world_size(size, f"{type(self).__qualname__}.world_size")
        self._check_backend()
        directory = launch.new_directory(type(self).__qualname__)
        self.addCleanup(launch.discard, directory)
        self._round = self._begin_round(size, directory)

    def _run_in_place(self, together: Round) -> None:
        """Run the test with a group of its own: nothing replaces a process whose group a failure has broken."""
        cls = type(self)

        def body(context: launch.RankContext) -> None:
            cls.rank, cls.world_size = context.rank, context.world_size
            cls._let_ranks_share_devices(context.world_size)
            cls._init_pg(context.rank, context.world_size, str(context.directory / "store"))
            cls._run_test_given_id(self.id())

        before = cls.rank, cls.world_size
        try:
            verdict = launched_ranks.run(together, body)
        finally:
            cls.rank, cls.world_size = before
        launched_ranks.stop_if_asked(self._result)
        raise_verdict(verdict, self.id(), self)

    def _start_task(self) -> None:
        ranks = self._running_ranks()
        if SanitizeKind.HASH in self._sanitize().kinds and not ranks.run.job.differs_in_hash:
            raise self._error("@sanitize('hash') must be on the class: its ranks start before the test")
        self._files = ranks.start(self.id(), self._sanitize().with_faults(self._plan))
        self.addCleanup(self._abandon_task, ranks)

    def _running_ranks(self) -> PersistentRanks:
        if self._persistent_ranks is None:
            raise self._error(f"no ranks were started: {type(self).__qualname__}.setUp() must call super().setUp()")
        return self._persistent_ranks

    def _state_changes(self, reports: Sequence[launch.RankReport]) -> list[str]:
        """The changes of global state that the ranks have noted, as sentences."""
        accounts = [(report.rank, report.final_account) for report in reports]
        by_change = grouped((note, rank) for rank, account in accounts if account is not None for note in account.notes)
        begin = f"{self._short_name()} left global state changed in"
        return [
            f"{begin} {list_of(ranks)}: {change}; the next test gets fresh ranks" for change, ranks in by_change.items()
        ]

    def _wait_for_ranks(self) -> None:
        if self._round is not None:
            self._run_in_place(self._round)
            return
        planned = faults_of_test(self, restarts=False)
        if isinstance(planned, Sweep):
            verdict = launch.sweep_verdict(planned, functools.partial(self._run_with, planned.recording))
        else:
            _, verdict = self._run_task()
        raise_verdict(verdict, self.id(), self)

    def _run_with(self, first: FaultPlan, plan: FaultPlan) -> tuple[Sequence[launch.RankReport], launch.Verdict]:
        """Run the test with these faults of a sweep. The first run has begun."""
        if plan != first:
            self._ensure_processes_spawned()
            self._plan = plan
            self._start_task()
        return self._run_task()

    def _run_task(self) -> tuple[Sequence[launch.RankReport], launch.Verdict]:
        """Wait for the ranks, which run the test, and judge them."""
        ranks = self._running_ranks()
        expected = launch.Expected(may_differ=self._collectives_may_differ())
        with self._interruptible():
            end = ranks.watch(self._timeout(), expected, self._endless())
        verdict = self._with_expectations(end.verdict(self._case()), str(self._files), len(end.reports))
        state_changes = self._state_changes(end.reports)
        if ranks.is_over or state_changes or self.isolated:
            self._dismiss_ranks()
        rank_warnings.warn_again_of_ranks(end.reports, filtered=verdict.outcome is launch.Outcome.PASSED)
        if verdict.outcome is launch.Outcome.PASSED:
            for text in state_changes:
                warnings.warn(text, GlobalStateWarning, stacklevel=2)
        elif state_changes:
            verdict = verdict.with_note("\n\n".join(state_changes))
        return end.reports, verdict

    def _endless(self) -> float | None:
        """The time-out of collectives that counts as endless: no test waits for the one that it has not chosen."""
        inherited = self.timeout is MultiProcContinuousTest.timeout
        return self.timeout.total_seconds() if inherited else None

    def _abandon_task(self, ranks: PersistentRanks) -> None:
        """End ranks that are still busy: if a subclass's setUp fails, the parent never waits for them."""
        if not ranks.is_over and ranks.is_busy:
            ranks.end()
            self._dismiss_ranks()


# -- a rank


def _run_rank(context: launch.RankContext, cls: type[MultiProcContinuousTest], rdvz_file: str) -> None:
    from torch_testing_ext.launch.persistent_ranks import tasks

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
    own_report.forget_memory_of_this_process()
    with rank_accounts.recorded_account(task.account, cls.failureException):
        with rank_warnings.recorded_warnings(task.account):
            cls._run_test_given_id(task.name)
        task.account.passed()
    if changes := changes_of_state(before, snapshot()):
        task.account.note(changes)
