"""The order of tests in a run with workers: cheapest first, so that failures come early.

Files stay whole, since the tests of a file may share a set-up. They are sorted by the mean recorded cost of their
tests. pytest-xdist gives each worker a continuous part of the list: each part is sorted, not the list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from tiers import Costs, name_of

Item = TypeVar("Item")


def cheapest_first(items: Sequence[Item], names: Sequence[str], costs: Costs, workers: int) -> list[Item]:
    """The items, whose ids are `names`, in their new order."""
    files: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        files[name.partition("::")[0]].append(index)

    def mean_cost(file: str) -> float:
        return sum(costs.of(name_of(names[index])) for index in files[file]) / len(files[file])

    parts: list[list[int]] = [[] for _ in range(workers)]
    for file in sorted(files, key=lambda file: (mean_cost(file), file)):
        min(parts, key=len).extend(files[file])
    # The parts differ a little in length, those of xdist do not. With the shorter ones first, the cheap begin of a part
    # may end the worker before, but no costly end begins a worker.
    return [items[index] for part in sorted(parts, key=len) for index in part]
