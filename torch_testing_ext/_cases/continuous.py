"""MultiProcContinuousTest: the tests of a class run one after another in ranks that stay.

The process group is made once, in ranks that are forked like any others. They are replaced as soon as there is doubt
of their state: when a test has failed, has left global state changed, or when the class wants each test isolated.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from torch_testing_ext import _torch, launch
from torch_testing_ext._asserts import expectations
from torch_testing_ext._machine import accelerators, seeds
from torch_testing_ext._machine.seeds import set_rng_seed
from torch_testing_ext._marks.needs import Skipped, first_unmet
from torch_testing_ext._process import system
from torch_testing_ext.launch import settings

from . import global_state
from .global_state import GlobalStateWarning
from .rank_process import RankProcess, leave_process_group, prepare_rank
from .ranked import (
    PARENT,
    RankedTestCase,
    RankError,
    checked_world_size,
    plainly,
    raise_verdict,
    report_error,
    report_exit,
    report_skip,
)

__unittest = True  # keeps these frames out of unittest's tracebacks
__rank_frame__ = True  # and out of the tracebacks of ranks

UNSET = -2
# Ranks that are told to leave only have to end.
PATIENCE_TO_LEAVE = 10.0


class MultiProcContinuousTest(RankedTestCase):
    """`setUp` and `tearDown` run in the parent, the test methods in every rank, which has its process group already.

    `world_size` is the number of accelerators unless the class says more. `isolated = True`: fresh ranks for each test.
    """

    MAIN_PROCESS_RANK = PARENT
    world_size: Any = UNSET
    rank: int = UNSET
    rdvz_file: str | None = None
    timeout: timedelta = timedelta(seconds=120)  # of the process group
    poison_pill: bool = False  # a class that sets it has the rest of its tests skipped
    isolated: bool = False
    fast_exit = True  # see MultiProcessTestCase

    # Of this very class, and of no subclass: hence always by `vars(cls)`.
    _crew: ClassVar[launch.PersistentRanks | None] = None
    _troubles: ClassVar[list[str]] = []
    processes: ClassVar[list[RankProcess]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        launch.Named.of(cls)  # so that a server that is forked off from now on has it

    # -- what subclasses may override

    @classmethod
    def backend_str(cls) -> str | None:
        """The group's backend; None: gloo, and the default backend of each device that is used."""
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
        """In a rank: make the default group. A rank that skips here skips all tests."""
        os.environ["LOCAL_RANK"] = str(rank)  # by which a mesh chooses the rank's device
        dist.init_process_group(
            backend=cls.backend_str(),
            world_size=world_size,
            rank=rank,
            store=dist.FileStore(rdvz_file, world_size),
            pg_options=cls.opts(),
            timeout=cls.timeout,
        )
        cls.pg = dist.group.WORLD  # type: ignore[attr-defined]

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        """In a rank: run one test."""
        name = test_id.rsplit(".", maxsplit=1)[-1]
        self = cls(name)
        self.rank = cls.rank
        self.world_size = cls.world_size
        set_rng_seed()
        with self._own_cleanups():
            getattr(self, name)(**kwargs)

    def _stand_in(self, test: Callable[[], Any]) -> Any:
        return self._worker_run_main_wait(test)

    def _worker_run_main_wait(self, fn: Callable[[], Any]) -> Any:
        @functools.wraps(fn)
        def wrapper(self: MultiProcContinuousTest, **kwargs: Any) -> None:
            __tracebackhide__ = True
            if self._is_rank():
                fn(**kwargs)
            else:
                self._wait_for_ranks()

        return types.MethodType(wrapper, self)

    def _is_rank(self) -> bool:
        return self.rank not in (PARENT, UNSET)

    # -- the parent: a class

    @classmethod
    def tearDownClass(cls) -> None:
        cls._dismiss_ranks()
        troubles, cls._troubles = vars(cls).get("_troubles", ()), []
        super().tearDownClass()
        if troubles:
            raise RankError("\n\n".join(troubles))

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        """Start the ranks for the first test that needs some, and where those of the one before are not to be used."""
        crew = vars(cls).get("_crew")
        if crew is not None and not crew.is_complete():
            cls._dismiss_ranks()
        if vars(cls).get("_crew") is None:
            given = cls._get_world_size(cls._device_type())
            cls.world_size = checked_world_size(given, f"{cls.__qualname__}.world_size")
            cls._check_backend()
            cls._spawn_processes(cls.world_size)

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        directory = launch.new_directory(cls.__qualname__)
        cls.rdvz_file = str(directory / "store")
        chosen = settings.read()
        job = launch.Job(
            body=launch.Named.of(_be_rank),
            subject=launch.Named.of(cls),
            world_size=world_size,
            directory=directory,
            context=launch.ProcessContext.here(system.for_gloo()),
            arguments={
                "world_size": world_size,
                "directory": directory,
                "rdvz_file": cls.rdvz_file,
                "seed": seeds.SEED,
                "patient": chosen.debug_rank is not None,
            },
            stream=chosen.stream,
            debug_rank=chosen.debug_rank,
        )
        cls._crew = launch.PersistentRanks(job)
        cls.processes = [RankProcess(cls._crew.run, rank) for rank in range(world_size)]

    @classmethod
    def _get_world_size(cls, device_type: str) -> Any:
        found = inspect.getattr_static(cls, "world_size")
        size = found.__get__(object.__new__(cls)) if isinstance(found, property) else cls.world_size
        if size != UNSET:
            return size
        devices = torch.get_device_module(device_type).device_count()
        if devices == 0:
            raise unittest.SkipTest(f"No {device_type} devices available")
        return devices

    @classmethod
    def _device_type(cls) -> str:
        """`device_type` may be a class method, a property, or just a string."""
        found = inspect.getattr_static(cls, "device_type")
        if isinstance(found, property):
            return found.__get__(object.__new__(cls))
        given = cls.device_type
        return given() if callable(given) else given

    @classmethod
    def _check_backend(cls) -> None:
        backend = cls.backend_str() if callable(cls.backend_str) else cls.backend_str
        if backend is not None and not dist.is_backend_available(backend):
            raise unittest.SkipTest(f"Backend '{backend}' is not available")

    @classmethod
    def _dismiss_ranks(cls) -> None:
        """Let the ranks leave. One that died after its tests had passed is the class's failure."""
        crew = vars(cls).get("_crew")
        if crew is None:
            return
        cls._crew, cls.processes = None, []
        if not crew.is_over:
            end = crew.dismiss(PATIENCE_TO_LEAVE)
            after = f"{cls.__qualname__} (after {crew.last})" if crew.last else cls.__qualname__
            verdict = launch.judge(end.reports, end.timed_out, launch.Case(after))
            if verdict.message:
                cls._troubles = [*vars(cls).get("_troubles", ()), verdict.message]
        _clean_up(crew.directory)

    # -- the parent: a test

    def setUp(self) -> None:
        super().setUp()
        self.rank = self.MAIN_PROCESS_RANK
        if self.poison_pill:
            raise unittest.SkipTest(f"{type(self).__qualname__}.poison_pill is set")
        skip = first_unmet(getattr(self, self._testMethodName))
        if skip is not None:
            raise Skipped(skip)
        with plainly():
            self._ensure_processes_spawned()
        self._order_test()

    def _order_test(self) -> None:
        crew = self._present_crew()
        self._files = crew.start(self.id())
        self.addCleanup(self._give_up_order, crew)

    def _present_crew(self) -> launch.PersistentRanks:
        crew = vars(type(self)).get("_crew")
        if crew is None:
            raise RankError(f"no ranks were started: {type(self).__qualname__}.setUp() must call super().setUp()")
        return crew

    def _wait_for_ranks(self) -> None:
        __tracebackhide__ = True
        crew = self._present_crew()
        try:
            end = crew.watch(self._timeout())
        except KeyboardInterrupt:
            if not self._runs_under_unittest():
                raise
            self._interrupt()
        verdict = launch.judge(end.reports, end.timed_out, self._case())
        verdict = self._with_expectations(verdict, str(self._files), len(end.reports))
        left_changed = self._left_changed(end.reports)
        if crew.is_over or left_changed or self.isolated:
            self._dismiss_ranks()
        if verdict.outcome is launch.Outcome.PASSED:
            for text in left_changed:
                warnings.warn(text, GlobalStateWarning, stacklevel=2)
        elif left_changed:
            verdict = replace(verdict, message="\n\n".join([verdict.message, *left_changed]))
        raise_verdict(verdict)

    def _left_changed(self, reports: tuple[launch.RankReport, ...]) -> list[str]:
        """The global state that is not as the test found it, in sentences."""
        by_note: dict[str, list[str]] = {}
        for report in reports:
            for note in report.notes:
                by_note.setdefault(note, []).append(str(report.rank))
        where = {note: f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for note, ranks in by_note.items()}
        begin = f"{self._short_name()} left changed in"
        return [f"{begin} {where[note]}: {note}; the next test gets fresh ranks" for note in by_note]

    def _give_up_order(self, crew: launch.PersistentRanks) -> None:
        """Where nobody waited for the ranks, since setUp failed after ours: they are in the middle of something."""
        if not crew.is_over and crew.is_busy:
            crew.end()
            self._dismiss_ranks()


def _clean_up(directory: Path) -> None:
    if settings.read().logs is None:
        shutil.rmtree(directory, ignore_errors=True)


# -- a rank


def _be_rank(
    cls: type[MultiProcContinuousTest],
    rank: int,
    report: launch.AccountWriter,
    *,
    world_size: int,
    directory: Path,
    rdvz_file: str,
    seed: int,
    patient: bool,
) -> None:
    """The body of a rank's process."""
    seeds.SEED = seed  # a new interpreter has not seen --seed
    prepare_rank(world_size, patient)
    cls.rank, cls.world_size, cls.rdvz_file = rank, world_size, rdvz_file
    try:
        cls._init_pg(rank, world_size, rdvz_file)
        for order in launch.tasks(directory, rank):
            _carry_out(cls, order)
        leave_process_group(cls.fast_exit)
    except unittest.SkipTest as skip:
        sys.exit(report_skip(report, skip))
    except SystemExit as leaving:
        report_exit(report, leaving)
        raise
    finally:
        _torch.end_compile_workers()


def _carry_out(cls: type[MultiProcContinuousTest], order: launch.Task) -> None:
    """One test, with what it leaves changed."""
    cls._recorder = expectations.ExpectationRecorder(str(order.path), cls.rank)
    before = global_state.look()
    try:
        cls._run_test_given_id(order.name)
        order.account.passed()
    except unittest.SkipTest as skip:
        report_skip(order.account, skip)
    except SystemExit as leaving:
        report_exit(order.account, leaving)
        if order.account.account is None:
            raise
    except BaseException as error:
        report_error(order.account, error, cls.failureException)
    if changes := global_state.changes(before, global_state.look()):
        order.account.note(changes)
