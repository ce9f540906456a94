"""Words for people, which several rooms need: counts, sizes, lists and names of files.

All functions depend on their arguments alone. Libraries for this (humanize, inflect) would be imported by every rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import pairwise
from typing import TypeVar

Key = TypeVar("Key")
Element = TypeVar("Element")

# Lines of a text with a line for each rank; in a larger world, ranks that did the same share one.
MOST_LINES = 8
# Names in a sentence.
MOST_NAMES = 5
# Similarity of names that are taken for one another, as difflib measures it; 1 means equal.
NEAR = 0.5
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_GIB, _MIB, _KIB = 2**30, 2**20, 2**10


def count(number: int, noun: str) -> str:
    """A number with a noun in singular or plural, such as `2 tests`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_in_words(amount: float) -> str:
    """An amount of bytes with a sensible unit, such as `79.6 GiB`, `512 MiB`, `1.91 MiB` or `12 KiB`."""
    if amount >= _GIB:
        return f"{amount / _GIB:.1f} GiB"
    if amount >= 100 * _MIB:
        return f"{amount / _MIB:.0f} MiB"
    return f"{amount / _MIB:.3g} MiB" if amount >= _MIB else f"{_three_digits(amount / _KIB)} KiB"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def first_names(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """The first of some names, and how many more there are: `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(name: str, known: Iterable[str], only_near: bool = False) -> str:
    """` Did you mean: a, b?`; the nearest known names if none is similar, unless `only_near`."""
    # Few processes ask.
    import difflib

    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, cutoff=NEAR)
    if near:
        return f" Did you mean: {', '.join(near)}?"
    if only_near:
        return ""
    nearest_names = difflib.get_close_matches(name, names, cutoff=0.0)
    return f" Nearest known: {', '.join(nearest_names)}." if nearest_names else ""


def few(lines: Sequence[str], most: int = MOST_LINES) -> list[str]:
    """The first of many lines, and the number of the others. A single one is shown rather than counted."""
    return list(lines) if len(lines) <= most + 1 else [*lines[:most], f"and {len(lines) - most} more"]


def list_of(ranks: Sequence[int]) -> str:
    """Ranks for a sentence: "rank 1", "ranks 0, 2", "ranks 0-3, 6", "ranks 0, 2, ..., 62"."""
    spans: list[list[int]] = []
    ordered = sorted(ranks)
    steps = {later - earlier for earlier, later in pairwise(ordered)}
    if len(ordered) > MOST_LINES and len(steps) == 1 and steps != {1}:
        return f"ranks {ordered[0]}, {ordered[1]}, ..., {ordered[-1]}"
    for rank in ordered:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    names = []
    for span in spans:
        if len(span) > 2:
            names.append(f"{span[0]}-{span[-1]}")
        else:
            names.append(", ".join(map(str, span)))
    if len(names) > MOST_LINES:
        names = [*names[:MOST_LINES], f"... ({len(ranks)} in all)"]
    return f"{verb_for(ranks, 'rank', 'ranks')} {', '.join(names)}"


def verb_for(ranks: Sized, of_one: str, of_several: str) -> str:
    """The form of a verb that fits these ranks."""
    return of_one if len(ranks) == 1 else of_several


def each_once(*groups: Iterable[str]) -> tuple[str, ...]:
    """The texts of all groups, without those that came before."""
    return tuple(dict.fromkeys(itertools.chain(*groups)))


def grouped(pairs: Iterable[tuple[Key, Element]]) -> dict[Key, list[Element]]:
    """The values of each key, in the order in which they come: most texts begin with what ranks did alike."""
    groups: dict[Key, list[Element]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def group_by(items: Sequence[Element], key: Callable[[Element], object]) -> list[list[Element]]:
    """Items with equal keys together, in the order of each group's first item."""
    return list(grouped((key(item), item) for item in items).values())


def file_name(text: str) -> str:
    """A text as a name for a file: what is no ASCII letter, digit, dot, dash or underscore is an underscore."""
    return _UNSAFE.sub("_", text)


def in_bytes(text: str) -> bytes:
    """A text in UTF-8, in every locale. Bytes that Python could not decode are as they were."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # Half of a surrogate pair, as in the name of a parametrized test.
        return text.encode("utf-8", "surrogatepass")
