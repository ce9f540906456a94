"""Decides which gradients travel together, in which order, and when a bucket may start.

Pure: parameters are numbers, and everything here is computed alike on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_MIB = 2**20


def bucket_limit(total: int, accelerator: bool) -> int:
    """The largest size of a bucket in bytes, for gradients of `total` bytes: a quarter of them, within bounds."""
    largest = 25 * _MIB if accelerator else 8 * _MIB
    return min(max(total // 4, _MIB), largest)


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Put positions 0, 1, ... into buckets of one kind and of at most `limit` bytes, unless a single one has more.

    The buckets are in the order in which they are complete if gradients come one after the other.
    """
    # By kind: the bucket that may still grow, and its size.
    growing: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if kind not in growing or filled[kind] + size > limit:
            growing[kind] = []
            filled[kind] = 0
            buckets.append(growing[kind])
        growing[kind].append(position)
        filled[kind] += size
    return sorted(buckets, key=lambda bucket: bucket[-1])


def agreed_order(positions: Sequence[Sequence[int]]) -> list[int]:
    """The parameters that any rank's backward has reached, in the order of the first rank that reached each.

    `positions` has one row per rank: for each parameter 1 + its place in the rank's backward, or 0.
    """
    keys: dict[int, tuple[int, int]] = {}
    for rank, places in enumerate(positions):
        for param, place in enumerate(places):
            if place:
                keys.setdefault(param, (rank, place))
    # Places on different ranks are comparable: they are the distance from the loss.
    return sorted(keys, key=lambda param: (keys[param][1], keys[param][0], param))


@dataclass
class BucketProgress:
    """Counts the gradients that have arrived in a backward. Buckets start in their order, the last one at the end."""

    bucket_of: dict[int, int]
    missing: list[int]
    next: int = 0

    @classmethod
    def of(cls, buckets: Sequence[Sequence[int]]) -> BucketProgress:
        numbers = {param: number for number, bucket in enumerate(buckets) for param in bucket}
        return cls(numbers, [len(bucket) for bucket in buckets])

    def arrive(self, param: int) -> range:
        """Note a gradient, and return the buckets that start now."""
        self.missing[self.bucket_of[param]] -= 1
        first = self.next
        while self.next < len(self.missing) - 1 and not self.missing[self.next]:
            self.next += 1
        return range(first, self.next)
