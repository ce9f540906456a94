"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.5  # similarity as difflib measures it; 1 means equal


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """` Did you mean: a, b?`; the nearest known names if none is similar."""
    names = sorted(set(known))
    if near := difflib.get_close_matches(name, names, n=most, cutoff=NEAR):
        return f" Did you mean: {', '.join(near)}?"
    nearest_names = difflib.get_close_matches(name, names, n=most, cutoff=0.0)
    return f" Nearest known: {', '.join(nearest_names)}." if nearest_names else ""
