"""`spawn`: a function in ranks, as torch.multiprocessing.spawn does it, with our start, verdict and clean-up."""

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._marks.settings_of_tests import kinds_on, may_differ
from torch_testing_ext._process.whole_files import source_file

from . import accounting, launched_ranks, passed_warnings
from .invocation import case_of
from .jobs import run_to_end
from .rank_life import run_rank
from .ranked import checked_world_size
from .verdicts import RankError

__unittest = True
# Does the same in pytest.
__tracebackhide__ = True


def spawn(
    function: Callable[..., object],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    backend: str | None = None,
) -> None:
    """Call `function(rank, *args)` in each of `world_size` fresh ranks; raise their common verdict unless all return.

    The ranks are forked off this process as it is now. Where that is not safe, they are new interpreters: the function
    must then be importable, and the arguments are pickled. `timeout`: in seconds; by default that of tests, 300.
    With `backend`, the ranks have a process group before the call.
    """
    size = checked_world_size(world_size, "world_size")
    launched_ranks.refuse("spawn")
    case = case_of(f"spawn({getattr(function, '__qualname__', function)!s})", source_file(function))
    run_in_ranks(case, function, size, args, timeout, may_differ(function), kinds_on(function), backend)


def run_in_ranks(
    case: launch.Case,
    function: Callable[..., object],
    size: int,
    args: tuple[Any, ...],
    timeout: float | None,
    collectives_may_differ: bool,
    sanitize: Iterable[str] = (),
    backend: str | None = None,
) -> None:
    """Do what `spawn` does, under the name of `case`. `sanitize`: kinds of checks."""

    start = partial(_start, function, args, backend)
    run_to_end(case, size, timeout, start, launch.Expected(may_differ=collectives_may_differ), sanitize)


def _start(
    function: Callable[..., object], args: tuple[Any, ...], backend: str | None, make_job: Callable[..., launch.Job]
) -> launch.Run:
    """Start the ranks. They inherit the call; only new interpreters are sent it, without closures."""
    try:
        return launch.launch_from_here(make_job(_run), (function, args, backend))
    except launch.CannotStart as error:
        why = error
    try:
        named = launch.Named.of(function)
    except (AttributeError, TypeError):
        raise RankError(f"{why}\n\nNew interpreters could run only a function that has a name.") from None
    try:
        # To pickle them may need the function's module.
        sent = pickle.dumps((args, backend))
        return launch.launch_fresh(make_job(_run, arguments={"call": (named, sent)}))
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
        with passed_warnings.recorded(context.account):
            if backend is not None:
                dist.init_process_group(backend)
            accounting.ran(function(context.rank, *args))

    run_rank(context, body)
