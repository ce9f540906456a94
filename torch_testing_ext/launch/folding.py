"""Recognises failures that are the same but for accidents, such as addresses and durations. Pure.

Only what cannot be part of a failure is ignored. Two different values in an assertion are two different failures.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch_testing_ext._process.words import grouped

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


_WARNING = re.compile(r"\S+:\d+: \w*Warning: |\[(rank\d+\]:)?\[?W[\]\d]")


def warnings_once(output: str, times: int = 1) -> str:
    """An output in which each warning is told once, with its line of the source; or so many times."""
    kept: list[str] = []
    seen: Counter[str] = Counter()
    is_repeated = False
    for line in output.splitlines():
        if _WARNING.match(line):
            is_repeated = seen[line] >= times
            seen[line] += 1
        elif not line.startswith("  "):
            is_repeated = False
        if not is_repeated:
            kept.append(line)
    return "\n".join(kept)


def groups(items: Sequence[Item], key: Callable[[Item], object]) -> list[list[Item]]:
    """Items with equal keys together, in the order of each group's first item."""
    return list(grouped((key(item), item) for item in items).values())
