"""The kinds of checks that `--sanitize` knows."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from torch_testing_ext._process.words import nearest


class SanitizeKind(enum.Enum):
    """One kind of check. The log of all calls, and its comparison across ranks, belong to each."""

    CALLS = "calls"
    ORDER = "order"
    WAITS = "waits"
    POISON = "poison"
    NAN = "nan"
    RACES = "races"
    UNBUFFERED = "unbuffered"
    REPLICAS = "replicas"
    HASH = "hash"


DEFAULT = frozenset({SanitizeKind.CALLS, SanitizeKind.ORDER, SanitizeKind.WAITS})
# Behind the name of the log of a rank that is started again.
AGAIN = ".again"
# New interpreters take seconds, and all operations in Python take long.
ALL = frozenset(SanitizeKind) - {SanitizeKind.HASH, SanitizeKind.RACES}
KNOWN = (*(kind.value for kind in SanitizeKind), "all", "default")


def kinds_of(names: Iterable[str]) -> frozenset[SanitizeKind]:
    """The kinds with these names. Raises ValueError for an unknown one."""
    kinds: set[SanitizeKind] = set()
    for name in names:
        match name.strip():
            case "all":
                kinds |= ALL
            case "default" | "1":
                kinds |= DEFAULT
            case known if known in KNOWN:
                kinds |= {SanitizeKind(known), SanitizeKind.CALLS}
            case other:
                raise ValueError(f"{other!r} is not a kind of check.{nearest(other, KNOWN)}")
    return frozenset(kinds)


def read_kinds(text: str) -> frozenset[SanitizeKind]:
    """The kinds of a comma-separated list. Raises ValueError for an unknown one, and for none."""
    return kinds_of(text.split(","))


def not_of_threads(chosen: frozenset[SanitizeKind]) -> str:
    """Say which of these checks are not made of ranks that are threads; "" if all are."""
    missing = [kind.value for kind in (SanitizeKind.HASH, SanitizeKind.REPLICAS) if kind in chosen]
    return f"ranks that are threads are not checked for: {', '.join(missing)}" if missing else ""
