"""Hypotheses on what a mistake in communication makes of a tensor. One that gives the reference exactly is a reason.

Pure: they know tensors, the parts that ranks hold of them, and the places of ranks on axes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_testing_ext.layouts.layout_text import groups_along
from torch_testing_ext.layouts.tensor_parts import Held, differences, largest, whole_part

# Of the largest element: rounding in float64 is four orders below, a mistake in logic many above.
TOLERANCE = 1e-9
# How exactly a factor must be one that means something.
_FACTOR = 1e-6
# The kinds that say little: of tensors that differ, some are a multiple of the reference anyway.
VAGUE = ("unlike", "scaled", "factors", "missing_scaled")
_MOST_ROWS = 4096
# Elements by which what is read from a flat buffer may be displaced.
_MOST_DISPLACED = 64


@dataclass(frozen=True)
class Reason:
    """A hypothesis that gives the reference exactly."""

    kind: str
    # Names of axes, or "microbatches".
    axis: str
    text: str

    @property
    def is_vague(self) -> bool:
        return self.kind in VAGUE


def is_close(a: torch.Tensor, b: torch.Tensor, scale: float, tolerance: float) -> bool:
    """Whether no element differs by more than `tolerance` of `scale`."""
    if a.shape != b.shape:
        return False
    return not a.numel() or float(differences(a, b).max()) <= tolerance * scale


def factor_of(have: torch.Tensor, want: torch.Tensor) -> float | None:
    """The multiple of `want` that is nearest to `have`; None if there is nothing of it."""
    square = float((want.double() ** 2).sum())
    return float((have.double() * want.double()).sum()) / square if square else None


def subsets(axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Each axis that has more than one rank, and each combination of such, the smallest first."""
    names = [axis for axis, size in axes.items() if size > 1]
    return [chosen for number in range(1, len(names) + 1) for chosen in itertools.combinations(names, number)]


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class Hypotheses:
    """The mistakes that could have been made in a layout, of these axes, places of ranks and microbatches."""

    def __init__(
        self,
        axes: Mapping[str, int],
        places: Mapping[int, Mapping[str, int]],
        microbatches: int = 1,
        unit: float = 0.0,
    ):
        # Labels of the step that count, and all; a step sets them.
        self.labels = (0, 0)
        self.axes, self.places, self.microbatches = axes, places, microbatches
        # `unit`: the rounding of the type in which it was computed.
        self.tolerance = max(10 * TOLERANCE, 8 * unit)

    def groups(self, over: Sequence[str], ranks: Sequence[int]) -> list[list[int]]:
        return groups_along(over, {rank: self.places[rank] for rank in ranks})

    def size(self, over: Sequence[str]) -> int:
        return math.prod(self.axes[axis] for axis in over)

    def of_tensor(self, whole: torch.Tensor, held: Held) -> list[Reason]:
        """The reasons for which ranks hold this, and not their parts of the whole."""
        scale = largest(whole) or 1.0
        want = {rank: part.of(whole) for rank, (_, part) in held.items()}

        def same(a: torch.Tensor, b: torch.Tensor) -> bool:
            return is_close(a, b, scale, self.tolerance)

        right = {rank: same(local, want[rank]) for rank, (local, _) in held.items()}
        wrong = [rank for rank in held if not right[rank]]
        if not wrong:
            return []
        broken = [rank for rank in wrong if bool((want[rank].isfinite() & ~held[rank][0].isfinite()).any())]
        if broken:
            return [Reason("not_finite", self.differing(right), f"is not finite on ranks {listed(broken)}")]
        if all(not held[rank][0].any() for rank in wrong):
            who = "" if len(wrong) == len(held) else f" on ranks {listed(wrong)}"
            return [Reason("zero", self.differing(right), f"is zero{who}: nothing reaches it")]
        found = [] if any(right.values()) else self._scaled(held, want, scale)
        found += self._unreduced(held, want, scale)
        found = found or list(itertools.islice(self._moved(whole, held, want, wrong, same), 1))
        if found:
            return found
        if any(right.values()):
            return [self._right_in_some(held, want, scale, right)]
        return self._unlike(held, scale)

    def of_number(self, whole: float, held: Mapping[int, float]) -> list[Reason]:
        """The same for a number. Only exact multiples and sums say something: every number is some multiple."""
        wanted = torch.tensor([whole], dtype=torch.float64)
        as_tensors = {
            rank: (torch.tensor([value], dtype=torch.float64), whole_part(wanted)) for rank, value in held.items()
        }
        found = [reason for reason in self.of_tensor(wanted, as_tensors) if not reason.is_vague]
        return (found or self._sums(whole, held))[:2] if whole else []

    def _sums(self, whole: float, held: Mapping[int, float]) -> list[Reason]:
        found = []
        for over in subsets(self.axes):
            totals = [sum(held[rank] for rank in group) / whole for group in self.groups(over, list(held))]
            for by in subsets(self.axes):
                size = self.size(by)
                for kind, factor, text in (("times", size, f"{size} times"), ("divided", 1 / size, f"1/{size} of")):
                    if all(abs(total - factor) < _FACTOR * factor for total in totals):
                        named = f"its sum over {' and '.join(over)} is {text} the reference"
                        found.append(Reason(kind, " ".join(by), f"{named}, by the size of {' and '.join(by)}"))
            for factor, reason in self._factors_of_padding():
                for said, by_size in (("sum", 1), ("average", self.size(over))):
                    if all(abs(total / by_size - factor) < _FACTOR * factor for total in totals):
                        found.append(Reason("padding", "", f"its {said} over {' and '.join(over)} {reason.text}"))
        return found

    def differing(self, right: Mapping[int, bool]) -> str:
        """The axes along which some ranks are right and others wrong."""
        single = [over for over in subsets(self.axes) if len(over) == 1]
        differ = [
            axis
            for (axis,) in single
            for group in self.groups([axis], list(right))
            if len({right[r] for r in group}) > 1
        ]
        return " ".join(dict.fromkeys(differ))

    # -- multiples

    def _scaled(self, held: Held, want: Mapping[int, torch.Tensor], scale: float) -> list[Reason]:
        factors = []
        for rank, (local, _) in held.items():
            factor = factor_of(local, want[rank])
            if factor is None:
                # A rank whose part is zero says nothing about a factor, but must be zero.
                if not is_close(local, want[rank], scale, self.tolerance):
                    return []
                continue
            if not is_close(local, factor * want[rank], scale * max(1.0, abs(factor)), self.tolerance):
                return []
            factors.append(factor)
        if not factors:
            return []
        one = sum(factors) / len(factors)
        bound = max(_FACTOR, self.tolerance)
        if max(factors) - min(factors) > bound * abs(one):
            each = listed_numbers(factors)
            return [Reason("factors", "", f"is the reference times another number in each rank: {each}")]
        if abs(one + 1) < bound:
            return [Reason("sign", "", "has the other sign")]
        exact = [reason for factor, reason in self._known_factors() if abs(one - factor) < bound * factor]
        # With microbatches, the square of a size says nothing besides.
        if any(reason.axis == "microbatches" for reason in exact):
            exact = [reason for reason in exact if "twice" not in reason.text]
        return exact or [Reason("scaled", "", f"is {one:.6g} times the reference")]

    def _known_factors(self) -> Iterator[tuple[float, Reason]]:
        many = self.microbatches
        if many > 1:
            times = f"is {many} times the reference: not divided by the number of microbatches"
            divided = f"is 1/{many} of the reference: divided by the number of microbatches once too often"
            yield many, Reason("times", "microbatches", times)
            yield 1 / many, Reason("divided", "microbatches", divided)
        yield from self._factors_of_padding()
        for over in subsets(self.axes):
            n, name, axis = self.size(over), " and ".join(over), " ".join(over)
            often = f"summed over {name} once too often, or not divided by its size"
            rarely = f"divided by the size of {name} once too often, or a sum over equal shares is missing"
            yield n, Reason("times", axis, f"is {n} times the reference: {often}")
            yield 1 / n, Reason("divided", axis, f"is 1/{n} of the reference: {rarely}")
            if math.isqrt(n) ** 2 != n:
                root = f"sqrt({n})"
                yield (
                    math.sqrt(n),
                    Reason("sqrt", axis, f"is {root} times the reference: a norm or scale counts {name} twice"),
                )
                yield (
                    1 / math.sqrt(n),
                    Reason("sqrt", axis, f"is 1/{root} of the reference: a norm or scale omits {name}"),
                )
            square = f"{n}*{n}"
            yield (
                n * n,
                Reason("times", axis, f"is {square} times the reference: multiplied by the size of {name} twice"),
            )
            yield (
                1 / n / n,
                Reason("divided", axis, f"is 1/({square}) of the reference: divided by the size of {name} twice"),
            )

    def _factors_of_padding(self) -> Iterator[tuple[float, Reason]]:
        counted, all_labels = self.labels
        if 0 < counted < all_labels:
            padding = "labels of -100, which do not count, are in the number by which the loss is divided"
            part = f"{counted}/{all_labels}"
            yield counted / all_labels, Reason("padding", "", f"is {part} of the reference: {padding}")
            without = "the loss is divided by the labels that count, where the reference divides by all"
            yield all_labels / counted, Reason("padding", "", f"is 1/({part}) of the reference: {without}")

    # -- reductions

    def _unreduced(self, held: Held, want: Mapping[int, torch.Tensor], scale: float) -> list[Reason]:
        """A reduction that is missing: ranks hold the same part and differ, and together they have the reference."""
        for over in subsets(self.axes):
            kinds, shares = set[str](), list[float]()
            for group in self.groups(over, list(held)):
                kind, of_group = self._kind_of_group(group, held, want, scale)
                kinds.add(kind)
                shares = shares or of_group
            if len(kinds) == 1 and "" not in kinds:
                # More axes would only hold repeats.
                return [_unreduced_reason(kinds.pop(), over, shares)]
        return []

    def _kind_of_group(
        self, group: Sequence[int], held: Held, want: Mapping[int, torch.Tensor], scale: float
    ) -> tuple[str, list[float]]:
        """Say that the sum, the mean or a multiple of the sum is the reference, or ""; and the share of each rank."""
        if len(group) < 2 or len({held[rank][1].key() for rank in group}) > 1:
            return "", []
        locals_, wanted = [held[rank][0].double() for rank in group], want[group[0]].double()
        if all(is_close(local, locals_[0], scale, self.tolerance) for local in locals_):
            return "", []
        total = torch.stack(locals_).sum(0)
        shares = [factor_of(local, wanted) or 0.0 for local in locals_]
        if is_close(total, wanted, scale, self.tolerance):
            return "sum", shares
        if is_close(total / len(group), wanted, scale, self.tolerance):
            return "mean", shares
        factor = factor_of(total, wanted)
        if factor and is_close(total, factor * wanted, scale * max(1.0, abs(factor)), self.tolerance):
            return f"{factor:.6g}", shares
        return "", []

    def _unlike(self, held: Held, scale: float) -> list[Reason]:
        """The axis along which ranks hold the same part and have other values, which no sum explains."""
        for (axis,) in (over for over in subsets(self.axes) if len(over) == 1):
            for group in self.groups([axis], list(held)):
                if len({held[rank][1].key() for rank in group}) == 1 < len(group) and not all(
                    is_close(held[rank][0], held[group[0]][0], scale, self.tolerance) for rank in group
                ):
                    missing = f"a reduction over {axis} is missing, or each computes something else"
                    same = f"ranks along {axis} hold the same part and have different values"
                    return [Reason("unlike", axis, f"{same}: {missing}")]
        return []

    def _right_in_some(
        self, held: Held, want: Mapping[int, torch.Tensor], scale: float, right: Mapping[int, bool]
    ) -> Reason:
        wrong = [rank for rank in held if not right[rank]]
        scaled = self._scaled({rank: held[rank] for rank in wrong}, want, scale)
        known = scaled and not scaled[0].is_vague
        more = f" ({scaled[0].text.partition(':')[0].removeprefix('is ')})" if known else ""
        axis = self.differing(right)
        fine = listed([rank for rank in held if right[rank]])
        where = f"is right on ranks {fine} and wrong on ranks {listed(wrong)}{more}"
        text = f"{where}: ranks differ over {axis or 'no one axis'}"
        return Reason("unlike", axis, text)

    # -- values at the wrong place

    def _moved(
        self,
        whole: torch.Tensor,
        held: Held,
        want: Mapping[int, torch.Tensor],
        wrong: Sequence[int],
        same: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> Iterator[Reason]:
        parts = {rank: part for rank, (_, part) in held.items()}
        owners = {r: next((s for s in held if s != r and same(held[r][0], parts[s].of(whole))), None) for r in wrong}
        if all(owner is not None for owner in owners.values()):
            pairs = ", ".join(f"rank {rank} that of rank {owner}" for rank, owner in owners.items())
            axis = self.differing({rank: rank not in wrong for rank in held}) or self._distinct(held)
            yield Reason("other_part", axis, f"ranks have another rank's part: {pairs}")
        for over in subsets(self.axes):
            for group in self.groups(over, list(held)):
                are_distinct = len({parts[rank].key() for rank in group}) == len(group) > 1
                if not are_distinct or len({want[rank].shape for rank in group}) > 1:
                    continue
                total = torch.stack([want[rank] for rank in group]).sum(0)
                for kind, value in (("sum", total), ("average", total / len(group))):
                    if all(same(held[rank][0], value) for rank in group):
                        of = f"is the {kind} of the parts of all ranks along {' and '.join(over)}"
                        text = f"{of}: they hold different parts, which must not be reduced"
                        yield Reason("parts_reduced", " ".join(over), text)
        for kind, text, change in _movements(whole.dim()):
            if all(same(change(held[rank][0]), want[rank]) for rank in wrong):
                yield Reason(kind, "", text)
        yield from self._rows(whole, held, wrong)
        yield from _displaced([(held[rank][0].flatten(), want[rank].flatten()) for rank in wrong], same)

    def _distinct(self, held: Held) -> str:
        """The axes along which ranks hold different parts."""
        singles = [over for over in subsets(self.axes) if len(over) == 1]
        return " ".join(
            axis
            for (axis,) in singles
            if any(len({held[rank][1].key() for rank in group}) > 1 for group in self.groups([axis], list(held)))
        )

    def _rows(self, whole: torch.Tensor, held: Held, wrong: Sequence[int]) -> Iterator[Reason]:
        """Each row is another row of the reference."""
        texts = []
        for rank in wrong if whole.dim() > 1 and 0 < whole.shape[0] <= _MOST_ROWS else ():
            local, part = held[rank]
            if any(rows is not None for rows in part.index[1:]):
                return
            rows = part.index[0]
            mine = torch.arange(whole.shape[0]) if rows is None else rows
            near = torch.cdist(local.double().flatten(1), whole.double().flatten(1)).min(1)
            exact = is_close(whole[near.indices], local, largest(whole), self.tolerance)
            if not exact or torch.equal(near.indices, mine):
                return
            off = (near.indices != mine).nonzero()[:, 0]
            first = f"row {int(mine[off[0]])} has row {int(near.indices[off[0]])} of the reference"
            texts.append(f"{first} ({len(off)} rows are others, rank {rank})")
        if texts:
            yield Reason("rows", "", "; ".join(texts[:2]))

    # -- tensors beside this one

    def of_earlier(self, now: torch.Tensor, before: torch.Tensor, held: Held) -> list[Reason]:
        """A gradient in which that of the step before is still there."""
        both = "that of this step and that of the step before: gradients are not cleared"
        # What is left may have been summed once more.
        sizes = {1, *(self.size(over) for over in subsets(self.axes))}
        left = [(both, now + size * before) for size in sorted(sizes)]
        for text, value in (*left, ("that of the step before", before)):
            if self._is(value, held):
                return [Reason("stale", "", f"is {text}")]
        return []

    def of_others(self, name: str, wholes: Mapping[str, torch.Tensor], held: Held) -> list[Reason]:
        """Another tensor of the reference, in place of this one."""
        for other, whole in wholes.items():
            if other != name and whole.shape == wholes[name].shape and whole.any() and self._is(whole, held):
                return [Reason("other_tensor", "", f"is {other} of the reference")]
        return []

    def _is(self, value: torch.Tensor, held: Held) -> bool:
        scale = largest(value)
        return all(is_close(local, part.of(value), scale, self.tolerance) for local, part in held.values())

    def of_update(self, before: torch.Tensor, after: torch.Tensor, held: Held) -> list[Reason]:
        """A step has added a multiple of what it should add to a parameter."""
        factors = []
        for local, part in held.values():
            old, new = part.of(before).double(), part.of(after).double()
            right, mine = new - old, local.double() - old
            factor = factor_of(mine, right)
            if factor is not None:
                factors.append(factor)
                if not is_close(mine, factor * right, largest(right) * max(1.0, abs(factor)), 1e-5):
                    return self._of_decay(before, after, held)
        if not factors or max(factors) - min(factors) > 1e-5 or abs(factors[0] - 1) < 1e-5:
            return []
        if abs(factors[0]) < 1e-5:
            lost = "the step does not change it, and gradients agree"
            return [Reason("update", "", f"{lost}: no optimizer holds it, or what the step wrote is lost")]
        added = f"what the step has added is {factors[0]:.6g} times that of the reference, and gradients agree"
        return [Reason("update", "", f"{added}: the learning rate, or what scales it")]

    def _of_decay(self, before: torch.Tensor, after: torch.Tensor, held: Held) -> list[Reason]:
        """Beside what it should add, a step has added a multiple of the parameter itself."""
        factors = []
        for local, part in held.values():
            old, rest = part.of(before).double(), local.double() - part.of(after).double()
            factor = factor_of(rest, old)
            if factor is not None:
                factors.append(factor)
                if not is_close(rest, factor * old, largest(old), self.tolerance):
                    return []
        if not factors or max(factors) - min(factors) > 1e-5 * abs(factors[0]):
            return []
        added = f"beside what the reference adds, the step has added {factors[0]:.6g} times the parameter itself"
        return [Reason("decay", "", f"{added}: its weight decay is another")]


def listed_numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _unreduced_reason(kind: str, over: Sequence[str], shares: Sequence[float]) -> Reason:
    name, axis = " and ".join(over), " ".join(over)
    have = f"ranks along {name} have {', '.join(f'{share:.2f}' for share in shares)} of the reference"
    if kind == "sum":
        return Reason("missing_sum", axis, f"{have}; their sum is the reference: a reduction over {name} is missing")
    if kind == "mean":
        return Reason(
            "missing_mean", axis, f"{have}; their average is the reference: an average over {name} is missing"
        )
    text = f"{have}; their sum is {kind} times it: a reduction over {name} is missing, and a factor is wrong"
    return Reason("missing_scaled", axis, text)


_Change = Callable[[torch.Tensor], torch.Tensor]


def _movements(dims: int) -> Iterator[tuple[str, str, _Change]]:
    """Changes that give the reference if elements were moved: a kind, a sentence, and the change."""
    if dims == 2:
        yield "transposed", "is transposed", torch.t
    for dim in range(dims):
        for by in (1, -1):
            text = f"is shifted by {-by} along dimension {dim}"
            yield "shifted", text, functools.partial(torch.roll, shifts=by, dims=dim)
        yield "reversed", f"is reversed along dimension {dim}", functools.partial(torch.flip, dims=(dim,))


def _displaced(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> Iterator[Reason]:
    """Say that each rank has its part of the reference from another element on. `pairs`: both, as one row."""
    most = min((len(mine) // 2 for mine, _ in pairs), default=0)
    for by in range(1, min(most, _MOST_DISPLACED) + 1):
        for sign, before, after in ((1, slice(by, None), slice(None, -by)), (-1, slice(None, -by), slice(by, None))):
            fits = all(same(mine[after], wanted[before]) for mine, wanted in pairs)
            # Of equal elements, each is in each place.
            if fits and not any(same(wanted[after], wanted[before]) for _, wanted in pairs):
                begin = f"begins with element {by} of its part" if sign > 0 else f"has its part from element {by} on"
                yield Reason("displaced", "", f"{begin}, as if it were read at a wrong offset of a flat buffer")
