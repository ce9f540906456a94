"""The first tensor in which ranks part that must hold it alike: parameters of DDP, replicated DTensors. Pure.

A difference counts only if it stays until the last look. Ranks that average now and then differ in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch_testing_ext._process.words import count, grouped, list_of

from .findings import Doing, Finding, FindingKind
from .records import GroupRecord, Site

Sum: TypeAlias = tuple[int | None, list[int], bool]  # digest, shape, is it a buffer
END = -1  # the point of a look at the end of a test


class Look(NamedTuple):
    """The digests of the tensors of a model at one point: 2n before the n-th step, 2n + 1 after it.

    `model`: its kind, its number among those of the group, and the group, by texts that are alike on all members.
    """

    model: str
    point: int
    site: Sequence[Any] | None  # file, line, function
    sums: Mapping[str, Sum]


def first_parted(looks: Mapping[int, Sequence[Look]]) -> Finding | None:
    """The first tensor in which ranks have parted for good; `looks` are those of each rank, in order."""
    by_model: dict[str, dict[int, dict[int, Look]]] = {}
    for rank, each in sorted(looks.items()):
        for look in each:
            by_model.setdefault(look.model, {}).setdefault(rank, {})[look.point] = look
    order = {id(look): number for each in looks.values() for number, look in enumerate(each)}
    found = []
    for of_rank in by_model.values():
        parted = []
        for name, point in _parted(of_rank):
            here = {rank: each[point] for rank, each in of_rank.items() if name in each[point].sums}
            first = next(iter(here.values()))
            parted.append((first.sums[name][2], order[id(first)], name, here))
        if parted:
            found.append((*min(parted, key=lambda one: one[:2]), len(parted) - 1))
    return _finding(*min(found, key=lambda one: one[:2])[2:]) if found else None


def _parted(of_rank: Mapping[int, Mapping[int, Look]]) -> Iterator[tuple[str, int]]:
    """Each tensor of a model that differs until the last look, with the point from which on it does."""
    first = next(iter(of_rank.values()))
    points = [point for point in first if all(point in each for each in of_rank.values())]
    while points and points[-1] % 2 and points[-1] != END:
        points.pop()  # nobody has looked again, so the ranks may have averaged after this step
    for name in first[points[0]].sums if points else ():
        series = [_differ(name, [each[point] for each in of_rank.values()]) for point in points]
        start = series.index(True) if True in series else len(series)
        if all(series[start:]) and points[start:] not in ([], [END]):
            yield name, points[start]


def _differ(name: str, looks: Sequence[Look]) -> bool:
    return len({look.sums[name][0] for look in looks if name in look.sums} - {None}) > 1


def _finding(name: str, looks: Mapping[int, Look], others: int) -> Finding:
    by_digest = grouped((look.sums[name][0], rank) for rank, look in looks.items())
    few, *rest = sorted(by_digest.values(), key=len)
    first = looks[few[0]]
    _, shape, is_buffer = first.sums[name]
    kind, _, group = first.model.split(" ", 2)
    group_name, description, members, _, _ = json.loads(group)
    who = f"{list_of(list(looks))} have parted from each other"
    if len(rest) == 1:
        who = f"{list_of(few)} {'has' if len(few) == 1 else 'have'} parted from {list_of(rest[0])}"
    more = f" and {count(others, 'more tensor')}" if others else ""
    where = f"{kind} in {GroupRecord(group_name, description, tuple(members), 0).title}"
    sentence = f"{who} {_when(first.point)}: {name} {list(shape)}{more} ({where})"
    if is_buffer:
        sentence += "; the next forward overwrites it with that of rank 0"
    lines = (
        Doing(rank, f"{name} is {look.sums[name][0] or 0:08x}", Site(*look.site) if look.site else None)
        for rank, look in looks.items()
    )
    return Finding(FindingKind.PARTED, sentence, tuple(lines), tuple(few), is_hazard=is_buffer)


def _when(point: int) -> str:
    step, is_after = divmod(point, 2)
    if is_after:
        return f"in step {step}"
    return f"between steps {step - 1} and {step}" if step > 1 else "before step 1"
