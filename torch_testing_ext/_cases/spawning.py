"""`spawn`: a function in ranks, as torch.multiprocessing.spawn does it, with our start, verdict and clean-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._marks.settings_of_tests import kinds_on, may_differ

from . import launched_ranks
from .jobs import run_to_end
from .rank_life import run_rank
from .ranked import checked_world_size
from .verdicts import RankError, without_our_traceback

__unittest = True
__rank_frame__ = True


def spawn(function: Callable[..., object], world_size: int, *args: Any, timeout: float | None = None) -> None:
    """Call `function(rank, *args)` in each of `world_size` fresh ranks; raise their common verdict unless all return.

    The ranks are forked off this process as it is now. Where that is not safe, they are new interpreters: the function
    must then be importable, and the arguments are pickled. `timeout`: in seconds; by default that of tests, 300.
    """
    __tracebackhide__ = True
    size = checked_world_size(world_size, "world_size")
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

    def start(make_job: Callable[..., launch.Job]) -> launch.Run:
        __tracebackhide__ = True
        return _start(make_job, function, args)

    run_to_end(case, size, timeout, start, launch.Expected(may_differ=collectives_may_differ), sanitize)


def _start(make_job: Callable[..., launch.Job], function: Callable[..., object], args: tuple[Any, ...]) -> launch.Run:
    """Start the ranks. They inherit the call; only new interpreters are sent it, without closures."""
    __tracebackhide__ = True
    try:
        return launch.launch_from_here(make_job(_run), (function, args))
    except launch.CannotStart as error:
        why = error
    try:
        named = launch.Named.of(function)
    except (AttributeError, TypeError):
        raise RankError(f"{why}\n\nNew interpreters could run only a function that has a name.") from None
    with without_our_traceback():
        try:
            return launch.launch_fresh(make_job(_run, arguments={"call": (named, args)}))
        except (TypeError, AttributeError, ImportError) as error:  # of pickle
            raise RankError(f"{why}\n\nNew interpreters cannot be sent the arguments: {error}") from None


def _run(context: launch.RankContext, call: tuple[launch.Named, tuple[Any, ...]] | None = None) -> None:
    """The body of a rank."""
    function, args = context.inherited if call is None else (call[0].resolve(), call[1])
    run_rank(context, lambda: function(context.rank, *args))
