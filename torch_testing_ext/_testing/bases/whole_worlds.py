"""Whole worlds: all ranks of a function, in forks that do not communicate, compared afterwards."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_testing_ext._collectives.worlds import world_traffic
from torch_testing_ext._collectives.worlds.world_records import WorldRecords
from torch_testing_ext._testing.bases.invocation import case_of
from torch_testing_ext._testing.bases.rank_accounts import refuse_to_run_nothing
from torch_testing_ext._testing.bases.rank_verdicts import raise_verdict
from torch_testing_ext._testing.bases.world_ranks import WorldBody, WorldRanks
from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD
from torch_testing_ext._tests.source_files import source_file
from torch_testing_ext.launch import session
from torch_testing_ext.launch.aspects.world import SIZE
from torch_testing_ext.launch.attempts import TestPlan
from torch_testing_ext.launch.most_ranks import too_many_in_world

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
__tracebackhide__ = True


@dataclass(frozen=True)
class World:
    """The ranks of a whole world, after the fact. Each list has an entry for each rank."""

    world_size: int
    # The most calls each of which had to wait for the one before.
    longest_chain: int
    # The ranks of each class: those in it have issued the same calls at the same lines.
    classes: list[list[int]]
    # Lines that read values which were not communicated, and collectives in opposite orders that nobody waits in.
    warnings: list[str]
    _records: WorldRecords

    def calls(self, group: str | None = None, op: str | None = None) -> list[int]:
        """Count the calls of each rank: of one operation, in the groups of a name or of a dimension of a mesh."""
        return [facts.calls(group, op) for facts in self._records.facts()]

    def bytes(self, group: str | None = None, op: str | None = None) -> list[int]:
        """Add up the bytes that each rank handed over as inputs of these calls."""
        return [facts.bytes(group, op) for facts in self._records.facts()]

    def between_nodes(self, nodes: int, group: str | None = None, op: str | None = None) -> list[int]:
        """Add up the bytes of calls in groups with members on several nodes. `nodes`: each has as many ranks."""
        if nodes < 1 or self.world_size % nodes:
            raise ValueError(f"{self.world_size} ranks cannot be shared out evenly among {nodes} nodes")
        return [facts.bytes_across(self.world_size // nodes, group, op) for facts in self._records.facts()]

    def memory(self) -> list[int]:
        """The most bytes that the tensors of each rank had at once."""
        return list(self._records.memory)

    def traffic(self, block: int = 1) -> list[list[int]]:
        """The bytes that each rank (row) sends to each other (column); with `block`, those of blocks of neighbours.

        A collective counts as the least that each rank must send, spread evenly over the other members.
        """
        if block < 1:
            raise ValueError(f"a block has at least one rank, not {block}")
        return world_traffic.traffic(self._records, block)


def check_world(
    function: Callable[..., object],
    world_size: int,
    *args: object,
    buffered_sends: bool = False,
    timeout: float = 60.0,
    **kwargs: object,
) -> World:
    """Run `function(rank, world_size, *args, **kwargs)` as each rank of a world, and compare what the ranks did.

    Each rank runs in a fork of its own, as many at once as there are cores. Its process groups do not communicate, so
    values are not those of a real run. Raises RankFailure if ranks disagree, and RankError if ranks would wait for ever
    or one fails. `buffered_sends`: a send ends before its message is received. `timeout`: in seconds, of each rank.
    """
    size = _checked_size(world_size)
    seconds = _checked_timeout(timeout)
    _check_flag(buffered_sends)
    refuse_to_run_nothing(function)
    name = f"check_world({_name_of(function)})"
    case = case_of(name, source_file(function))
    return _check(lambda rank: function(rank, size, *args, **kwargs), TestPlan(case, size, seconds), buffered_sends)


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or str(function)


def _check(call: Callable[[int], object], plan: TestPlan, buffered_sends: bool) -> World:
    """Call a function with each rank of a world, and judge it."""
    host = WorldRanks(WorldBody(lambda context: call(context.rank), is_test=False), buffered_sends=buffered_sends)
    raise_verdict(session.run(host, plan))
    facts = host.facts
    assert facts is not None
    classes = [alike.ranks for alike in facts.records.classes]
    return World(plan.world_size, facts.progress.chain, classes, host.warnings, facts.records)


def _checked_size(given: Any) -> int:
    """The size of a world. Raises TypeError or ValueError unless it is a number of ranks that a world can have."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"world_size is {given!r}; it must be a number of ranks: 1, 2, 3 ...")
    size = operator.index(given)
    if size < 1:
        raise ValueError(f"a world has at least one rank, not {size}")
    if why := too_many_in_world(size):
        raise ValueError(f"world_size is {size}; {why}")
    return size


def _checked_timeout(given: Any) -> float:
    """The time limit of a rank. Raises TypeError or ValueError unless it is a positive number of seconds."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"timeout is {given!r}; it must be a number of seconds, such as 60")
    if not 0 < given < math.inf:
        raise ValueError(f"timeout is {given!r}; it must be a positive number of seconds")
    return float(given)


def _check_flag(buffered_sends: Any) -> None:
    if not isinstance(buffered_sends, bool):
        raise TypeError(f"buffered_sends is {buffered_sends!r}; it must be True or False")


Function = TypeVar("Function", bound=Callable[..., Any])


def whole_world(world_size: int, *, buffered_sends: bool = False, timeout: float = 60.0) -> Callable[[Function], Any]:
    """Decorator: run a test as each rank of a world, without communication.

    The test is called with the arguments `rank` and `world_size`, besides its own. The runner's option --simulate N
    replaces the size.
    """
    if callable(world_size):
        raise TypeError("@whole_world needs the size of the world: @whole_world(8)")
    size = _checked_size(world_size)
    seconds = _checked_timeout(timeout)
    _check_flag(buffered_sends)

    def decorate(function: Function) -> Any:
        if isinstance(function, type):
            raise TypeError(f"@whole_world is for a test, and {function.__qualname__} is a class: put it on its tests")
        if hasattr(function, WHOLE_WORLD):
            raise TypeError(f"{function.__qualname__} has @whole_world already; give it once")
        refuse_to_run_nothing(function)

        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True

            chosen = SIZE.value() or size

            def run(rank: int) -> object:
                return function(*args, rank=rank, world_size=chosen, **kwargs)

            case = case_of(_name_of(function), source_file(function))
            _check(run, TestPlan(case, chosen, seconds), buffered_sends)

        setattr(test, WHOLE_WORLD, True)
        signature = inspect.signature(function)
        own = [parameter for name, parameter in signature.parameters.items() if name not in ("rank", "world_size")]
        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return test

    return decorate
