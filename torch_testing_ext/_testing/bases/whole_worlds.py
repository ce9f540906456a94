"""Whole worlds: all ranks of a function, in forks that do not communicate, and what they would have done together."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._collectives.findings.finding import FindingKind
from torch_testing_ext._collectives.findings.opposite_orders import first_inversion
from torch_testing_ext._collectives.worlds import world_traffic, world_views
from torch_testing_ext._collectives.worlds.world_progress import Progress, judge
from torch_testing_ext._collectives.worlds.world_records import WorldRecords, bytes_of
from torch_testing_ext._process import fork_safety, temporary_folders
from torch_testing_ext._process.words import few, grouped, list_of
from torch_testing_ext._testing.bases.rank_verdicts import RankError, RankFailure
from torch_testing_ext._testing.bases.world_forks import Ranks, _require_forks
from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD
from torch_testing_ext._torch.operations import operation_hook
from torch_testing_ext.launch import launch_settings
from torch_testing_ext.launch.user_warnings import show_to_user


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
    _memory: list[int]

    def calls(self, group: str | None = None, op: str | None = None) -> list[int]:
        """Count the calls of each rank: of one operation, in the groups of a name or of a dimension of a mesh."""
        return [len(issued) for issued in self._records.issued(group, op)]

    def bytes(self, group: str | None = None, op: str | None = None) -> list[int]:
        """Add up the bytes that each rank handed over as inputs of these calls."""
        return [sum(map(bytes_of, issued)) for issued in self._records.issued(group, op)]

    def memory(self) -> list[int]:
        """The most bytes that the tensors of each rank had at once."""
        return list(self._memory)

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
    __tracebackhide__ = True
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")
    ranks = run_ranks(lambda rank: function(rank, world_size, *args, **kwargs), world_size, timeout)
    return judge_ranks(ranks, buffered_sends)


def run_ranks(body: Callable[[int], object], world_size: int, timeout: float, is_test: bool = False) -> Ranks:
    """Run all ranks. `is_test`: the body is that of a test which was written for ranks that communicate."""
    if dist.is_initialized():
        raise RuntimeError("this process has a process group: check a whole world before it makes one, or destroy it")
    _require_forks(fork_safety.prepare_to_fork())
    was_installed = operation_hook.is_installed()
    operation_hook.install()
    try:
        with temporary_folders.temporary_folder("torch_testing_ext-world-") as folder:
            ranks = Ranks(folder, world_size, timeout, body, is_test)
            ranks.run()
    finally:
        if not was_installed:
            operation_hook.remove()
    return ranks


def judge_ranks(ranks: Ranks, buffered_sends: bool = False) -> World:
    """Compare what the ranks did. Raises RankFailure or RankError, or SkipTest for a test that cannot be judged."""
    __tracebackhide__ = True
    if ranks.errors:
        alike_in = grouped((text, rank) for rank, (text, _) in ranks.errors.items())
        lines = [f"{list_of(alike)}: {text}" for text, alike in alike_in.items()]
        first = min(ranks.errors)
        _, whole = ranks.errors[first]
        text = "\n".join([f"{len(ranks.errors)} of {ranks.world_size} ranks failed", *few(lines), "", whole])
        error = RankFailure(text) if ranks.assertions.get(first) else RankError(text)
        error.failure = FailureView.of_text(text, title=lines[0].partition("\n")[0])
        raise error
    progress = Progress(ranks.records, buffered_sends)
    if world_views.noted_worlds is not None:
        not_judged = [*ranks.not_judged, *ranks.cuts]
        with_calls = launch_settings.read_settings().lanes
        world_views.noted_worlds.append(world_traffic.view_of(ranks.records, progress.chain, not_judged, with_calls))
    finding = judge(ranks.records, progress, is_cut=bool(ranks.cuts))
    if finding is not None:
        classes = "\n".join(few([str(alike) for alike in ranks.records.classes]))
        text = f"{finding.text}\n\n{classes}"
        # As in a real run: ranks that disagree fail, and ranks that hang are an error.
        hangs = finding.kind in (FindingKind.DEADLOCK, FindingKind.ABANDONED)
        found = RankError(text) if hangs else RankFailure(text)
        found.failure = FailureView.of_text(text, next(iter(finding.sites), None), title=finding.title)
        raise found
    if ranks.cuts:
        # What the ranks did until there has been compared.
        raise unittest.SkipTest(f"not judged: compares communicated values at {next(iter(ranks.cuts))}")
    warnings = [f"{list_of(alike)}: {text}" for text, alike in ranks.warnings.items()]
    warnings += [f"not judged: compares communicated values at {line}" for line in ranks.not_judged]
    inversion = first_inversion(ranks.records.records)
    if inversion is not None:
        # They do not wait for each other here. With NCCL, they may.
        warnings.append("\n".join([inversion.sentence, *map(str, inversion.lines)]))
    for line in few(warnings):
        show_to_user(line)
    classes_of_ranks = [alike.ranks for alike in ranks.records.classes]
    return World(ranks.world_size, progress.chain, classes_of_ranks, warnings, ranks.records, ranks.memory)


Function = TypeVar("Function", bound=Callable[..., Any])


def whole_world(world_size: int, *, buffered_sends: bool = False, timeout: float = 60.0) -> Callable[[Function], Any]:
    """Decorator: run a test as each rank of a world, without communication.

    The test is called with the arguments `rank` and `world_size`, besides its own. The runner's option --world N
    replaces the size.
    """

    def decorate(function: Function) -> Any:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True

            def run(rank: int, size: int) -> None:
                function(*args, rank=rank, world_size=size, **kwargs)

            chosen = launch_settings.read_settings().world or world_size
            check_world(run, chosen, buffered_sends=buffered_sends, timeout=timeout)

        setattr(test, WHOLE_WORLD, True)
        signature = inspect.signature(function)
        own = [parameter for name, parameter in signature.parameters.items() if name not in ("rank", "world_size")]
        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return test

    return decorate
