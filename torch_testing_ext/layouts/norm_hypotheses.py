"""Hypotheses on the norm of gradients: which mistake makes it a multiple of the right one. Pure."""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence

import torch

from torch_testing_ext.layouts.hypotheses import Hypotheses, Reason, subsets
from torch_testing_ext.layouts.tensor_parts import Held

_FACTOR = 1e-6
_INSTEAD = "and not the root of the sum of squares"
# What is made of the parts of ranks in place of the right norm: a kind, words, and its square from their squares.
_REDUCTIONS: tuple[tuple[str, str, Callable[[Sequence[float]], float]], ...] = (
    ("norm", "that of all ranks' parts along {}, so that what is replicated there counts more than once", sum),
    ("operation", f"the sum of those of ranks along {{}}, {_INSTEAD}", lambda each: sum(map(math.sqrt, each)) ** 2),
    ("operation", f"the largest of those of ranks along {{}}, {_INSTEAD}", max),
)


def reasons_for_norm(
    hypotheses: Hypotheses,
    wholes: Mapping[str, torch.Tensor],
    held: Mapping[str, Held],
    ratios: Mapping[int, float],
) -> list[Reason]:
    """The reasons for which the norm of each rank is a multiple of that of the reference.

    `wholes`, `held`: the gradients of the reference, and what ranks hold of them.
    """
    squares = {name: _square(whole) for name, whole in wholes.items() if name in held}
    total = sum(squares.values())
    if not total:
        return []

    def fits(wanted: Mapping[int, float]) -> bool:
        return all(
            abs(ratio - math.sqrt(max(0.0, wanted[rank]) / total)) < _FACTOR * ratio for rank, ratio in ratios.items()
        )

    # Of the reference's values: that gradients are wrong themselves is another mistake.
    parts = {
        rank: {(n, of[rank][1].key()): _square(of[rank][1].of(wholes[n])) for n, of in held.items() if rank in of}
        for rank in hypotheses.places
    }
    cutting = hypotheses.differing({rank: frozenset(own) for rank, own in parts.items()}).split()
    found: dict[str, list[Reason]] = {"norm_local": [], "norm": [], "operation": []}
    # What several hold, the first of them counts.
    alone = {
        rank: sum(square for part, square in parts[rank].items() if not any(part in parts[each] for each in group[:at]))
        for group in hypotheses.groups(cutting, list(parts))
        for at, rank in enumerate(group)
    }
    for over in ((), *subsets(hypotheses.axes)):
        name, axis, rest = " and ".join(over), " ".join(over), [each for each in cutting if each not in over]
        of_ranks = {
            rank: [parts[other] for other in group] for group in hypotheses.groups(over, list(parts)) for rank in group
        }
        once = {rank: sum(ChainMap(*group).values()) for rank, group in of_ranks.items()}
        if rest and (fits(once) or (not over and fits(alone))):
            own = f"each rank's norm is that of its own parts: it is not summed over {' and '.join(rest)}"
            found["norm_local"].append(Reason("norm_local", " ".join(rest), f"{own}, along which parameters are cut"))
        for kind, words, reduce in _REDUCTIONS if over else ():
            sums = {rank: reduce([sum(own.values()) for own in group]) for rank, group in of_ranks.items()}
            # More axes would only hold repeats.
            if fits(sums) and not (kind == "operation" and found[kind]):
                found[kind].append(Reason(kind, axis, f"the norm is {words.format(name)}"))
    reasons = list(dict.fromkeys(next(filter(None, found.values()), [])))
    for name in list(squares):
        # The same parameter of all layers.
        pattern = re.sub(r"\d+", "*", name)
        squares[pattern] = sum(
            value for each, value in squares.items() if "*" not in each and re.sub(r"\d+", "*", each) == pattern
        )
    for name, square in squares.items():
        for kind, words, wanted in (("omits", "leaves out", total - square), ("twice", "counts twice", total + square)):
            if fits(dict.fromkeys(parts, wanted)):
                reasons.append(Reason(f"norm_{kind}", "", f"the norm {words} {name}"))
    return reasons


def _square(tensor: torch.Tensor) -> float:
    return float((tensor.double() ** 2).sum())
