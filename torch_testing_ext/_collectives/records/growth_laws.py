"""Growth: what a rank issues in one world, beside what one issues in a larger world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch_testing_ext._process.words import count

# Places of a number in a message.
_MOST_PLACES = 6


class GrowthClaim(NamedTuple):
    """The claim of a rank that a number grows with the world by a law, and that number in its own world.

    `at_most`: the exponent of the law; 0 means that it does not grow, and 1 that it grows as the world does.
    """

    # "the bytes of all_reduce in group dp".
    what: str
    at_most: float
    amount: int
    # The numbers of the places that the amount comes from.
    lines: tuple[str, ...] = ()


# A claim, and how many of the same came before it in its rank.
_Key: TypeAlias = tuple[str, float, int]


def largest_of(claims_of_ranks: Iterable[Sequence[GrowthClaim]]) -> dict[_Key, GrowthClaim]:
    """Of each claim, that of the rank with the largest number."""
    largest: dict[_Key, GrowthClaim] = {}
    for claims in claims_of_ranks:
        before: Counter[tuple[str, float]] = Counter()
        for claim in claims:
            key = (claim.what, claim.at_most, before[claim.what, claim.at_most])
            before[claim.what, claim.at_most] += 1
            if key not in largest or claim.amount > largest[key].amount:
                largest[key] = claim
    return largest


def why_not_kept(
    small: Mapping[_Key, GrowthClaim], size: int, large: Mapping[_Key, GrowthClaim], large_size: int
) -> str:
    """Say which claims do not hold from a world of one size to a larger one; "" if all do. Both have all of them."""
    parts = []
    for key, claim in small.items():
        other = large[key]
        if not claim.amount:
            parts.append(f"no rank has any {claim.what}, so that they cannot grow")
            continue
        allowed = claim.amount * (large_size / size) ** claim.at_most
        if other.amount > allowed:
            parts.append(
                f"{claim.what} grow with the world: {claim.amount} in {count(size, 'rank')}, {other.amount} in "
                f"{large_size}, at_most={claim.at_most:g} allows {round(allowed)}"
            )
            parts += [f"    in {large_size}: {line}" for line in _shown(other.lines, claim.lines)]
    return "\n".join(parts)


def _shown(lines: Sequence[str], before: Sequence[str]) -> list[str]:
    """The places with another number than before."""
    changed = [line for line in lines if line not in before]
    more = f"... and {count(len(changed) - _MOST_PLACES, 'place')} more"
    return changed[:_MOST_PLACES] + [more] * (len(changed) > _MOST_PLACES)
