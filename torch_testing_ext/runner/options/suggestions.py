"""The nearest known names, for whoever misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.5  # of difflib's likeness, 1 being the same


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """` Did you mean: a, b?`, or at least what there is."""
    names = sorted(set(known))
    if near := difflib.get_close_matches(name, names, n=most, cutoff=NEAR):
        return f" Did you mean: {', '.join(near)}?"
    known_ones = difflib.get_close_matches(name, names, n=most, cutoff=0.0)
    return f" Nearest known: {', '.join(known_ones)}." if known_ones else ""
