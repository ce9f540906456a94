"""The strictness of a comparison, and the places of its items."""

import dataclasses
from typing import Any

ItemPath = tuple[Any, ...]
# The two values at a place.
Leaf = tuple[ItemPath, Any, Any]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The strictness of a comparison. A floor raises a tolerance, given or default."""

    rtol: float | None = None
    atol: float | None = None
    rtol_floor: float = 0.0
    atol_floor: float = 0.0
    equal_nan: bool = True
    exact_dtype: bool = True
    exact_device: bool = False
    exact_layout: bool = False
    exact_stride: bool = False
    exact_is_coalesced: bool = False


def place(path: ItemPath) -> str:
    if not path:
        return ""
    return f"\n\nThe failure occurred for item {spell(path)}"


def spell(path: ItemPath) -> str:
    return "".join(f"[{item!r}]" for item in path)
