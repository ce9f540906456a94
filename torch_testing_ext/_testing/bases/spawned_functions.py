"""`spawn`: a function in ranks, as torch.multiprocessing.spawn does it, with our start, verdict and clean-up."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._machine import accelerators
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.devices_setting import AUTO, default_devices
from torch_testing_ext._testing.bases import launched_ranks, rank_accounts, ranked_test_case
from torch_testing_ext._testing.bases.invocation import case_of
from torch_testing_ext._testing.bases.rank_life import run_rank
from torch_testing_ext._testing.bases.rank_verdicts import RankError, raise_verdict
from torch_testing_ext._testing.bases.ranked_test_case import checked_world_size
from torch_testing_ext._testing.bases.shown_ranks import ShownRanks
from torch_testing_ext._testing.marks import needs
from torch_testing_ext._testing.marks.settings_of_tests import checked_devices, devices_for, kinds_on, may_differ
from torch_testing_ext._tests.source_files import source_file
from torch_testing_ext.launch import session
from torch_testing_ext.launch.aspects import warnings_in_rank
from torch_testing_ext.launch.attempts import DeviceNeed, RankAttempt, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


def spawn(
    function: Callable[..., object],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    backend: str | None = None,
    devices: int | str | None = None,
) -> None:
    """Call `function(rank, *args)` in each of `world_size` fresh ranks, and fail if it fails in a rank.

        def train(rank, steps): ...

        spawn(train, 4, 10, backend="gloo")

    With `backend`, the ranks have a process group before the call. `timeout` is in seconds (default: 300).
    `devices="auto"` gives each rank an accelerator if there are enough, else the CPU; 0 is the CPU; with a number, the
    test skips on a machine with fewer. The default is the project's setting `devices`, or what `backend` needs.

    Ranks are forked from this process. If that is not safe, they are new interpreters: then the function must be
    importable, and the arguments are pickled.
    """
    size = checked_world_size(world_size, "world_size")
    _check_arguments(function, size, args)
    launched_ranks.refuse("spawn")
    need = need_of_devices(devices, size, backend, _name_of(function))
    run_spawned(function, size, args, timeout, backend, need)


def _check_arguments(function: Callable[..., object], size: int, args: tuple[Any, ...]) -> None:
    """Raise TypeError for a call that every rank would refuse: here it is shown at the line of the user."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Not all functions in C have a signature.
        return
    try:
        signature.bind(0, *args)
    except TypeError as error:
        name = getattr(function, "__qualname__", function)
        passed = "".join(f", {value!r}" for value in args)
        raise TypeError(
            f"each rank would call {name}(rank{passed}), but its signature is {name}{signature}: {error}. Pass what it "
            f"lacks after the number of ranks, as in spawn({name}, {size}, ...)"
        ) from None


def _name_of(function: Callable[..., object]) -> str:
    return f"spawn({getattr(function, '__qualname__', function)!s})"


def need_of_devices(
    devices: int | str | None, world_size: int, backend: str | None = None, name: str = ""
) -> DeviceNeed:
    """The accelerators that ranks are to lease; all others are hidden from them. Raises a skip if there are too few.

    Where nothing says what the ranks use, they see all, and none is leased.
    """
    default = default_devices(Path(user_commands.working_folder() or os.sep))
    devices = devices_for(checked_devices(devices), world_size, backend, default)
    if devices == AUTO:
        devices = world_size if accelerators.most_ranks() >= world_size else 0
    skip = needs.devices(devices).unmet() if isinstance(devices, int) and devices else None
    if skip is not None:
        raise needs.Skipped(skip)
    count = devices if isinstance(devices, int) else 0
    return DeviceNeed(count, are_hidden=devices is not None and not count, owner=f"pid {os.getpid()}: {name}")


def run_spawned(
    function: Callable[..., object],
    size: int,
    args: tuple[Any, ...],
    timeout: float | None = None,
    backend: str | None = None,
    need: DeviceNeed | None = None,
    case: launch.Case | None = None,
    targets: Sequence[Any] = (),
) -> None:
    """Do what `spawn` does, with these devices, under the name of `case`.

    `targets`: whose decorators hold for the ranks, in place of the function's.
    """
    launched_ranks.refuse("spawn")
    targets = targets or (function,)
    plan = TestPlan(
        case or case_of(_name_of(function), source_file(function)),
        size,
        timeout or ranked_test_case.TIMEOUT_DEFAULT,
        launch.Expected(may_differ=may_differ(*targets)),
        kinds_on(*targets),
        devices=need or DeviceNeed(),
    )
    raise_verdict(session.run(_SpawnedRanks(function, args, backend), plan))


class _SpawnedRanks(ShownRanks):
    """A function in ranks that inherit the call; only new interpreters are sent it, without closures."""

    kind = HostKind.INHERITING

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], backend: str | None):
        super().__init__()
        self._function = function
        self._args = args
        self._backend = backend

    def start(self, attempt: RankAttempt) -> None:
        try:
            self.run = launch.launch_from_here(attempt.job(_run), (self._function, self._args, self._backend))
        except launch.CannotStart as error:
            if error.is_refused:
                raise
            self.run = self._start_new_interpreters(attempt, error)

    def _start_new_interpreters(self, attempt: RankAttempt, why: Exception) -> launch.Run:
        try:
            named = launch.Named.of(self._function)
        except (AttributeError, TypeError):
            raise RankError(f"{why}\n\nNew interpreters could run only a function that has a name.") from None
        try:
            # To pickle them may need the function's module.
            sent = pickle.dumps((self._args, self._backend))
            return launch.launch_fresh(attempt.job(_run, arguments={"call": (named, sent)}))
        except (pickle.PicklingError, TypeError, AttributeError, ImportError) as error:
            raise RankError(f"{why}\n\nNew interpreters cannot be sent the arguments: {error}") from None


def _run(context: launch.RankContext, call: tuple[launch.Named, bytes] | None = None) -> None:
    """The body of a rank."""
    if call is None:
        function, args, backend = context.inherited
    else:
        named, sent = call
        function = named.resolve()
        args, backend = pickle.loads(sent)

    def body() -> None:
        with warnings_in_rank.recorded_warnings(context.account):
            if backend is not None:
                dist.init_process_group(backend)
            rank_accounts.refuse_what_ran_nothing(function(context.rank, *args))

    run_rank(context, body)
