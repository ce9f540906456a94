"""The text of a layout: axes with sizes, the outermost first, and the places that ranks have on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SINGLE = "single"
ARROW = "->"


def parse_axes(text: str) -> dict[str, int]:
    """Read "dp=2 tp=2"; "single" has no axes. Raises ValueError."""
    axes: dict[str, int] = {}
    words = text.split() if isinstance(text, str) else []
    for word in words:
        name, _, size = word.partition("=")
        if word == SINGLE and len(words) == 1:
            return {}
        if not (name.isidentifier() and size.isdecimal() and int(size) >= 1) or name in axes:
            raise _no_layout(text)
        axes[name] = int(size)
    if not axes:
        raise _no_layout(text)
    return axes


def _no_layout(text: object) -> ValueError:
    return ValueError(f"{text!r} is no layout: write 'single', or axes such as 'dp=2 tp=2'")


def parse_steps(text: str) -> list[str]:
    """The layouts of "tp=2 -> dp=2", which saves in the first and continues in the second. Raises ValueError."""
    parts = [part.strip() for part in text.split(ARROW)] if isinstance(text, str) else [text]
    for part in parts:
        parse_axes(part or text)
    if len(parts) > 2:
        raise ValueError(f"{text!r} has {len(parts) - 1} arrows: a layout saves once and continues once")
    return parts


def axes_of_all(texts: Iterable[str]) -> list[str]:
    """The names of all axes, in the order in which they come up."""
    return list(dict.fromkeys(axis for text in texts for part in parse_steps(text) for axis in parse_axes(part)))


def places_of(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """The place of a rank on each axis; ranks that differ on the last axis only are neighbours."""
    places = {}
    for name, size in reversed(list(axes.items())):
        rank, places[name] = divmod(rank, size)
    return places


def groups_along(over: Sequence[str], places: Mapping[int, Mapping[str, int]]) -> list[list[int]]:
    """Ranks that differ only in their places on these axes. `places`: of each rank."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, own in places.items():
        found.setdefault(tuple((axis, place) for axis, place in own.items() if axis not in over), []).append(rank)
    return list(found.values())
