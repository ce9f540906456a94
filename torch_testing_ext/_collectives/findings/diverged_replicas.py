"""The first tensor in which ranks diverge that must hold it alike: parameters of DDP, replicated DTensors.

Pure.

A difference counts only if it stays until the last look. Ranks that average now and then differ in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch_testing_ext._collectives.records.issued_calls import GroupRecord
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import grouped, list_of, verb_for

from .finding import Doing, Finding, FindingKind

# Digest, shape, is it a buffer.
Sum: TypeAlias = tuple[int | None, list[int], bool]
# The point of a look at the end of a test.
END = -1


class Look(NamedTuple):
    """The digests of the tensors of a model at one point: 2n before the n-th step, 2n + 1 after it.

    `model`: its kind, its number among those of the group, and the group, by texts that are alike on all members.
    """

    model: str
    point: int
    # File, line, function.
    site: Sequence[Any] | None
    sums: Mapping[str, Sum]


class _Divergence(NamedTuple):
    """A tensor from the point on at which ranks have diverged, with their looks there."""

    is_buffer: bool
    # The number of the first rank's look among its looks.
    order: int
    name: str
    looks: Mapping[int, Look]

    @property
    def gravity(self) -> tuple[bool, int]:
        """Of several, the one with the smallest comes first: a parameter before a buffer, then the earlier look."""
        return self.is_buffer, self.order


def first_diverged(looks: Mapping[int, Sequence[Look]]) -> Finding | None:
    """The first tensor in which ranks have diverged for good; `looks` are those of each rank, in order."""
    by_model: dict[str, dict[int, dict[int, Look]]] = {}
    order: dict[int, int] = {}
    for rank, of_rank in sorted(looks.items()):
        for number, look in enumerate(of_rank):
            by_model.setdefault(look.model, {}).setdefault(rank, {})[look.point] = look
            order[id(look)] = number
    firsts: list[tuple[_Divergence, int]] = []
    for by_rank in by_model.values():
        diverged = [_divergence_at(name, point, by_rank, order) for name, point in _divergences(by_rank)]
        if diverged:
            firsts.append((min(diverged, key=_gravity), len(diverged) - 1))
    if not firsts:
        return None
    first, others = min(firsts, key=lambda pair: pair[0].gravity)
    return _finding(first.name, first.looks, others)


def _gravity(diverged: _Divergence) -> tuple[bool, int]:
    return diverged.gravity


def _divergence_at(
    name: str, point: int, by_rank: Mapping[int, Mapping[int, Look]], order: Mapping[int, int]
) -> _Divergence:
    """The looks of all ranks at a point that know this tensor."""
    looks = {rank: of_rank[point] for rank, of_rank in by_rank.items() if name in of_rank[point].sums}
    first = next(iter(looks.values()))
    _, _, is_buffer = first.sums[name]
    return _Divergence(is_buffer, order[id(first)], name, looks)


def _divergences(by_rank: Mapping[int, Mapping[int, Look]]) -> Iterator[tuple[str, int]]:
    """Each tensor of a model that differs until the last look, with the point from which on it does."""
    first = next(iter(by_rank.values()))
    points = [point for point in first if all(point in of_rank for of_rank in by_rank.values())]
    while points and points[-1] % 2 and points[-1] != END:
        # Nobody has looked again, so the ranks may have averaged after this step.
        points.pop()
    if not points:
        return
    for name in first[points[0]].sums:
        differs = [_differ(name, [of_rank[point] for of_rank in by_rank.values()]) for point in points]
        if True not in differs:
            continue
        start = differs.index(True)
        if all(differs[start:]) and points[start:] != [END]:
            yield name, points[start]


def _differ(name: str, looks: Sequence[Look]) -> bool:
    digests = {look.sums[name][0] for look in looks if name in look.sums}
    return len(digests - {None}) > 1


def _finding(name: str, looks: Mapping[int, Look], others: int) -> Finding:
    """The finding about a tensor, and how many others there are."""
    by_digest = grouped((look.sums[name][0], rank) for rank, look in looks.items())
    few, *rest = sorted(by_digest.values(), key=len)
    first = looks[few[0]]
    _, shape, is_buffer = first.sums[name]
    kind, _, group = first.model.split(" ", 2)
    group_name, description, members, _, _ = json.loads(group)
    title = GroupRecord(group_name, description, tuple(members), 0).title
    if len(rest) == 1:
        who = f"{list_of(few)} {verb_for(few, 'has', 'have')} diverged from {list_of(rest[0])}"
    else:
        who = f"{list_of(list(looks))} have diverged from each other"
    more = ""
    if others:
        more = f" and {others} more tensor{'s' if others > 1 else ''}"
    sentence = f"{who} {_when(first.point)}: {name} {list(shape)}{more} ({kind} in {title})"
    if is_buffer:
        sentence += "; the next forward overwrites it with that of rank 0"
    lines = []
    for rank, look in looks.items():
        digest = look.sums[name][0] or 0
        site = Site(*look.site) if look.site else None
        lines.append(Doing(rank, f"{name} is {digest:08x}", site))
    return Finding(FindingKind.DIVERGED, sentence, tuple(lines), tuple(few), is_hazard=is_buffer)


def _when(point: int) -> str:
    step, is_after = divmod(point, 2)
    if is_after:
        return f"in step {step}"
    return f"between steps {step - 1} and {step}" if step > 1 else "before step 1"
