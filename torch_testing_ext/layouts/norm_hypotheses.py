"""Hypotheses on the norm of gradients: which mistake makes it a multiple of the right one. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping

import torch

from torch_testing_ext.layouts.hypotheses import Hypotheses, Reason
from torch_testing_ext.layouts.tensor_parts import Held

_FACTOR = 1e-6


def reasons_for_norm(
    hypotheses: Hypotheses,
    wholes: Mapping[str, torch.Tensor],
    held: Mapping[str, Held],
    ratios: Mapping[int, float],
    data: tuple[str, ...],
) -> list[Reason]:
    """The reasons for which the norm of each rank is a multiple of that of the reference.

    `data`: axes that cut samples. `wholes`, `held`: the gradients of the reference, and what ranks hold of them.
    """
    squares = {name: _square(whole) for name, whole in wholes.items() if name in held}
    total = sum(squares.values())
    if not total:
        return []
    ranks = hypotheses.places
    # Of the reference's values: that gradients are wrong themselves is another mistake.
    mine = {rank: sum(_square(of[rank][1].of(wholes[n])) for n, of in held.items() if rank in of) for rank in ranks}

    def fits(wanted: Callable[[int], float]) -> bool:
        return all(
            abs(ratio - math.sqrt(max(0.0, wanted(rank)) / total)) < _FACTOR * ratio for rank, ratio in ratios.items()
        )

    cuts = " ".join(axis for axis, size in hypotheses.axes.items() if size > 1 and axis not in data)
    local = Reason(
        "norm_local",
        cuts or " ".join(hypotheses.axes),
        "each rank's norm is that of its own parts: it is not summed over the axes that cut parameters",
    )
    found = []
    for number in range(len(hypotheses.axes) + 1):
        for over in itertools.combinations(hypotheses.axes, number):
            groups = {rank: group for group in hypotheses.groups(over, list(ranks)) for rank in group}
            if fits(lambda rank, groups=groups: sum(mine[other] for other in groups[rank])):  # type: ignore[misc]
                name = " and ".join(over)
                parts = f"the norm is that of all ranks' parts along {name}"
                counted = f"{parts}, so that what is replicated there counts more than once"
                found.append(Reason("norm", " ".join(over), counted) if over else local)
    if not found:
        alone = {rank: _own(rank, hypotheses, wholes, held) for rank in ranks}
        if fits(lambda rank: alone[rank]):
            found.append(local)
    for name in list(squares):
        # The same parameter of all layers.
        pattern = re.sub(r"\d+", "*", name)
        squares[pattern] = sum(
            value for each, value in squares.items() if "*" not in each and re.sub(r"\d+", "*", each) == pattern
        )
    for name, square in squares.items():
        if fits(lambda rank, square=square: total - square):  # type: ignore[misc]
            found.append(Reason("norm_omits", "", f"the norm leaves out {name}"))
        if fits(lambda rank, square=square: total + square):  # type: ignore[misc]
            found.append(Reason("norm_twice", "", f"the norm counts {name} twice"))
    return found


def _square(tensor: torch.Tensor) -> float:
    return float((tensor.double() ** 2).sum())


def _own(rank: int, hypotheses: Hypotheses, wholes: Mapping[str, torch.Tensor], held: Mapping[str, Held]) -> float:
    """The square of the parts that only this rank holds, and on the first rank also of those that all have."""
    is_first = not any(hypotheses.places[rank].values())
    own = [(name, of[rank][1]) for name, of in held.items() if rank in of]
    return sum(_square(part.of(wholes[name])) for name, part in own if is_first or not part.is_whole)
