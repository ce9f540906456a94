"""The split of tests into shards."""

import hashlib
from collections.abc import Sequence

from torch_testing_ext._process.words import in_bytes
from torch_testing_ext.runner.model import Test
from torch_testing_ext.runner.options import ShardSpec

from .plan import OVERHEAD, ExpectedSeconds, TimedGroup, group_by_fixtures, longest_first, seconds_of_group


def shard(tests: Sequence[Test], part: ShardSpec, expected: ExpectedSeconds) -> tuple[Test, ...]:
    """The tests of one shard. Every test is in exactly one shard, if all shards know the same durations."""
    groups = list(group_by_fixtures(tests))
    durations = [seconds_of_group(group, expected) for group in groups]
    if any(seconds is not None for seconds in durations):
        chosen = _by_durations(groups, durations, part)
    else:
        chosen = []
        for group in groups:
            if _by_hash(group, part.count) == part.index - 1:
                chosen.append(group)
    return tuple(test for group in chosen for test in group)


def _by_hash(group: Sequence[Test], parts: int) -> int:
    """The index of a group's shard. It depends only on the group: a new test moves no other test to another shard."""
    first = group[0]
    name = str(first.id)
    if first.together:
        name = f"{first.id.file}::{first.together}"
    digest = hashlib.sha256(in_bytes(name)).digest()
    return int.from_bytes(digest[:8], "big") % parts


def _by_durations(
    groups: list[list[Test]],
    durations: list[float | None],
    part: ShardSpec,
) -> list[list[Test]]:
    """Assigns the longest group first, each to the shard with the least work so far."""
    known = [seconds for seconds in durations if seconds is not None]
    typical = sum(known) / len(known)
    timed: list[TimedGroup] = []
    for seconds, group in zip(durations, groups, strict=True):
        timed.append((typical if seconds is None else seconds, group))
    timed.sort(key=longest_first)
    work_of_shards = [0.0] * part.count
    chosen = []
    for seconds, group in timed:
        least = work_of_shards.index(min(work_of_shards))
        work_of_shards[least] += seconds + OVERHEAD
        if least == part.index - 1:
            chosen.append(group)
    return chosen
