"""Recognises failures that are the same but for accidents, such as addresses and durations. Pure.

Only what cannot be part of a failure is ignored. Two different values in an assertion are two different failures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_ACCIDENTS = (
    (re.compile(r"\bat 0x[0-9a-f]+\b"), "at an address"),  # <object object at 0x7f...>
    (re.compile(r"\b[Tt]hread 0x[0-9a-f]+\b"), "thread"),
    (re.compile(r"\bpid[ =:]+\d+"), "pid"),
)
_SECONDS = re.compile(r"\b(after|into|in) ?\d+\.\d+ s\b|\b\d+\.\d+ s into\b")


def without_accidents(text: str) -> str:
    """A text without what differs from one time to the next: addresses, process ids, and how long it took."""
    return _SECONDS.sub("some time", _without_places(text))


def _without_places(text: str) -> str:
    for pattern, word in _ACCIDENTS:
        text = pattern.sub(word, text)
    return text


def without_own_number(text: str, rank: int) -> str:
    """A rank's text without its own number in brackets, as torch prints it, and without addresses and process ids.

    Any other number may be a value that was compared, or say more than the number of the rank, so it stays.
    """
    return re.sub(rf"\[rank[ :]?{rank}\]", "[own rank]", _without_places(text), flags=re.IGNORECASE)


def groups(items: Sequence[Item], key: Callable[[Item], object]) -> list[list[Item]]:
    """Items with equal keys together, in the order of each group's first item."""
    found: dict[object, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def numbers(ranks: Sequence[int]) -> str:
    """The numbers of ranks in words, such as `rank 3`, `ranks 0, 1` or `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
