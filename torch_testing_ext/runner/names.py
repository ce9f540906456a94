"""The nearest known names, for whoever misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """` Did you mean: a, b?`, or nothing where nothing is near."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=most, cutoff=0.5)
    return f" Did you mean: {', '.join(near)}?" if near else ""
