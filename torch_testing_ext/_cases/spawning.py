"""`spawn`: a function in ranks, as torch.multiprocessing.spawn does it, with our start, verdict and clean-up."""

from __future__ import annotations

import shutil
import sys
import unittest
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_testing_ext import _torch, launch
from torch_testing_ext._marks.collectives import may_differ
from torch_testing_ext._marks.sanitizing import kinds_on
from torch_testing_ext.launch import settings
from torch_testing_ext.launch.job import Sanitize

from . import group_creation, launched_ranks, rank_environment, rank_process, ranked

__unittest = True
__rank_frame__ = True

# What the ranks of this moment inherit: neither closures nor arguments need be sent to them.
_call: tuple[Callable[..., object], tuple[Any, ...]] | None = None


def spawn(function: Callable[..., object], world_size: int, *args: Any, timeout: float | None = None) -> None:
    """Call `function(rank, *args)` in each of `world_size` fresh ranks; raise their common verdict unless all return.

    The ranks are forked off this process as it is now. Where that is not safe, they are new interpreters: the function
    must then be importable, and the arguments are pickled. `timeout`: in seconds; by default that of tests, 300.
    """
    __tracebackhide__ = True
    size = ranked.checked_world_size(world_size, "world_size")
    launched_ranks.refuse("spawn")
    case = launch.Case(f"spawn({getattr(function, '__qualname__', function)!s})")
    run_in_ranks(case, function, size, args, timeout, may_differ(function), kinds_on(function))


def run_in_ranks(
    case: launch.Case,
    function: Callable[..., object],
    size: int,
    args: tuple[Any, ...],
    timeout: float | None,
    collectives_may_differ: bool,
    sanitize: Iterable[str] = (),
) -> None:
    """Do what `spawn` does, under the name of `case`. `sanitize`: kinds of checks."""
    __tracebackhide__ = True
    global _call
    with ranked.without_our_traceback():
        chosen = settings.read()
        ranked.say_if_nothing_is_recorded()
        checks = ranked.sanitize_with(sanitize)
        directory = launch.new_directory(case.name)
    try:
        with rank_environment.leased(size) as addresses:
            _call = function, args
            try:
                run, is_own = _start(function, args, size, directory, addresses, chosen, checks)
            finally:
                _call = None
            try:
                expected = launch.Expected(may_differ=collectives_may_differ)
                result = launch.watch(run, _limit(timeout, chosen), expected)
            finally:
                if is_own:
                    run.server.close()
        verdict = result.verdict(case)
        if verdict.outcome is launch.Outcome.PASSED:
            print_output(directory, size)
    finally:
        if chosen.logs is None:
            shutil.rmtree(directory, ignore_errors=True)
    ranked.raise_verdict(None, verdict)


def _limit(timeout: float | None, chosen: settings.Settings) -> float | None:
    return None if chosen.debug_rank is not None else timeout or ranked.TIMEOUT_DEFAULT


def _start(
    function: Callable[..., object],
    args: tuple[Any, ...],
    size: int,
    directory: Path,
    addresses: dict[str, str],
    chosen: settings.Settings,
    sanitize: Sanitize,
) -> tuple[launch.Run, bool]:
    """Start the ranks. Returns also whether they have a fork server of their own."""
    __tracebackhide__ = True
    body = launch.Named.of(_run)
    patient = chosen.debug_rank is not None
    job = launch.Job(
        body=body,
        subject=body,
        world_size=size,
        directory=directory,
        context=launch.ProcessContext.here(addresses),
        arguments={"call": None, "world_size": size, "directory": directory, "patient": patient},
        stream=chosen.stream,
        debug_rank=chosen.debug_rank,
        sanitize=sanitize,
    )
    try:
        return launch.launch_from_here(job), True
    except launch.CannotStart as error:
        why = error
    try:
        named = launch.Named.of(function)
    except (AttributeError, TypeError):
        raise ranked.RankError(f"{why}\n\nNew interpreters could run only a function that has a name.") from None
    other = launch.Job(**{**vars(job), "arguments": {**job.arguments, "call": (named, args)}})
    with ranked.without_our_traceback():
        try:
            return launch.launch_fresh(other), False
        except (TypeError, AttributeError, ImportError) as error:  # of pickle
            raise ranked.RankError(f"{why}\n\nNew interpreters cannot be sent the arguments: {error}") from None


def print_output(directory: Path, world_size: int) -> None:
    """Print what the ranks have printed, each line after its rank."""
    for rank in range(world_size):
        with suppress(OSError):
            for line in (directory / f"rank{rank}.log").read_text(errors="replace").splitlines():
                print(f"[rank{rank}] {line}")


def _run(
    subject: Any,
    rank: int,
    account: launch.AccountWriter,
    *,
    call: tuple[launch.Named, tuple[Any, ...]] | None,
    world_size: int,
    directory: Path,
    patient: bool,
) -> None:
    """The body of a rank's process."""
    rank_environment.become(rank)
    rank_process.prepare_rank(rank, world_size, patient)
    group_creation.announce(directory, rank)
    function, args = _call or (None, ())
    if call is not None:
        function, args = call[0].resolve(), call[1]
    assert function is not None
    try:
        function(rank, *args)
        rank_process.leave_process_group(fast=True)
        account.passed()
    except unittest.SkipTest as skip:
        ranked.account_for_skip(account, skip)
    except Exception as error:
        ranked.account_for_error(account, error)
    except BaseException as error:
        if not _is_pytest_skip(error):
            raise
        ranked.account_for_skip(account, unittest.SkipTest(str(error)))
    finally:
        _torch.end_compile_workers()
        group_creation.wait_for_peers()


def _is_pytest_skip(error: BaseException) -> bool:
    pytest = sys.modules.get("pytest")
    return pytest is not None and isinstance(error, pytest.skip.Exception)
