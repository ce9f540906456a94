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
from torch_testing_ext.layouts.tensor_parts import Held, Part, differences, largest, whole_part

# Of the largest element: rounding in float64 is four orders below, a mistake in logic many above.
TOLERANCE = 1e-9
# How exactly a factor must be one that means something.
_FACTOR = 1e-6
# The kinds that say little: of tensors that differ, some are a multiple of the reference anyway.
VAGUE = ("unlike", "scaled", "factors", "missing_scaled")
# What of all ranks is the reference, and what is missing.
_SHARES = {"sum": ("sum", "a reduction"), "mean": ("average", "an average")}
_RARELY = "divided by the size of {name} once too often, or a sum over equal shares is missing"
# What is meant by a power of the size of axes.
_POWERS = (
    (1, "times", "is {n} times the reference: summed over {name} once too often, or not divided by its size"),
    (-1, "divided", f"is 1/{{n}} of the reference: {_RARELY}"),
    (0.5, "sqrt", "is sqrt({n}) times the reference: a norm or scale counts {name} twice"),
    (-0.5, "sqrt", "is 1/sqrt({n}) of the reference: a norm or scale omits {name}"),
    (2, "squared", "is {n}*{n} times the reference: multiplied by the size of {name} twice"),
    (-2, "squared", "is 1/({n}*{n}) of the reference: divided by the size of {name} twice"),
)
_MOST_ROWS = 4096
# Elements by which what is read from a flat buffer may be displaced.
_MOST_DISPLACED = 64
# Tensors beside each other in a flat buffer, of which another one has elements.
_MOST_PIECES = 4


@dataclass(frozen=True)
class Reason:
    """A hypothesis that gives the reference exactly."""

    kind: str
    # Names of axes, or "microbatches".
    axis: str
    text: str
    # Of one tensor: whether the text is a sentence of its own, not what is said of the tensor.
    is_sentence: bool = False

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
        # A vague reason says nothing beside one that explains the values.
        found = [reason for reason in found if not reason.is_vague] or found
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
            for said, size in (("sum", 1), ("average", self.size(over))):
                for factor, reason in self._known_factors():
                    fits = all(abs(total / size - factor) < _FACTOR * factor for total in totals)
                    # By sizes of axes, a sum and an average say the same.
                    if fits and (size == 1 or reason.kind == "padding"):
                        text = f"its {said} over {' and '.join(over)} {reason.text}"
                        found.append(Reason(reason.kind, reason.axis, text))
        return found

    def differing(self, values: Mapping[int, object]) -> str:
        """The axes along which ranks differ in a value, such as whether they are right."""
        return " ".join(
            axis
            for axis in self.axes
            if any(len({values[rank] for rank in group}) > 1 for group in self.groups([axis], list(values)))
        )

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
        # With microbatches, the square or the root of a size says nothing more.
        if any(reason.axis == "microbatches" for reason in exact):
            exact = [reason for reason in exact if reason.kind not in ("squared", "sqrt")]
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
            n = self.size(over)
            for power, kind, text in _POWERS:
                # A root of 4 is 2, by which an axis of 2 ranks is meant.
                if abs(power) >= 1 or math.isqrt(n) ** 2 != n:
                    yield n**power, Reason(kind, " ".join(over), text.format(n=n, name=" and ".join(over)))

    def _factors_of_padding(self) -> Iterator[tuple[float, Reason]]:
        counted, all_labels = self.labels
        if 0 < counted < all_labels:
            padding = "labels of -100, which do not count, are in the number by which the loss is divided"
            part = f"{counted}/{all_labels}"
            yield counted / all_labels, Reason("padding", "", f"is {part} of the reference: {padding}")
            without = "the loss is divided by the labels that count, where the reference divides by all"
            yield all_labels / counted, Reason("padding", "", f"is 1/({part}) of the reference: {without}")

    # -- reductions

    def _alike(self, over: Sequence[str], held: Held) -> list[list[int]]:
        """Ranks along these axes that hold the same part: where there are more ranks than heads, some of them do."""
        found: dict[object, list[int]] = {}
        for number, group in enumerate(self.groups(over, list(held))):
            for rank in group:
                found.setdefault((number, held[rank][1].key()), []).append(rank)
        return list(found.values())

    def _unreduced(self, held: Held, want: Mapping[int, torch.Tensor], scale: float) -> list[Reason]:
        """A reduction that is missing: ranks hold the same part and differ, and together they have the reference."""
        for over in subsets(self.axes):
            groups = self._alike(over, held)
            kinds = {self._kind_of_group(group, held, want, scale) for group in groups}
            if len(kinds) == 1 and "" not in kinds:
                # More axes would only hold repeats.
                kind, axes = kinds.pop(), " and ".join(over)
                words, what = _SHARES.get(kind, ("sum", "a reduction"))
                among = ", among ranks with the same part," if len(groups[0]) < self.size(over) else ""
                times = "" if kind in _SHARES else f"{kind} times "
                text = f"the {words} over {axes}{among} is {times}the reference: {what} over {axes} is missing"
                return [
                    Reason(f"missing_{kind if kind in _SHARES else 'scaled'}", " ".join(over), text, is_sentence=True)
                ]
        return []

    def _kind_of_group(self, group: Sequence[int], held: Held, want: Mapping[int, torch.Tensor], scale: float) -> str:
        """Say that the sum, the mean or a multiple of the sum is the reference, or ""."""
        locals_, wanted = [held[rank][0].double() for rank in group], want[group[0]].double()
        if all(is_close(local, locals_[0], scale, self.tolerance) for local in locals_):
            return ""
        total = torch.stack(locals_).sum(0)
        if is_close(total, wanted, scale, self.tolerance):
            return "sum"
        if is_close(total / len(group), wanted, scale, self.tolerance):
            return "mean"
        factor = factor_of(total, wanted)
        is_multiple = factor and is_close(total, factor * wanted, scale * max(1.0, abs(factor)), self.tolerance)
        return f"{factor:.6g}" if is_multiple else ""

    def _unlike(self, held: Held, scale: float) -> list[Reason]:
        """The axis along which ranks hold the same part and have other values, which no sum explains."""
        for axis in self.axes:
            for group in self._alike([axis], held):
                if not all(is_close(held[rank][0], held[group[0]][0], scale, self.tolerance) for rank in group):
                    missing = f"a reduction over {axis} is missing, or each computes something else"
                    same = f"ranks along {axis} hold the same part and have different values"
                    return [Reason("unlike", axis, f"{same}: {missing}", is_sentence=True)]
        return []

    def _right_in_some(
        self, held: Held, want: Mapping[int, torch.Tensor], scale: float, right: Mapping[int, bool]
    ) -> Reason:
        wrong = [rank for rank in held if not right[rank]]
        scaled = self._scaled({rank: held[rank] for rank in wrong}, want, scale)
        axis = self.differing(right)
        fine = listed([rank for rank in held if right[rank]])
        where = (
            f"is right on ranks {fine} and wrong on ranks {listed(wrong)}: ranks differ over {axis or 'no one axis'}"
        )
        known = f"; on those, it {scaled[0].text}" if scaled and not scaled[0].is_vague else ""
        return Reason("unlike", axis, where + known)

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
            axis = self.differing({rank: rank not in wrong for rank in held}) or self.differing(
                {rank: part.key() for rank, part in parts.items()}
            )
            yield Reason("other_part", axis, f"ranks have another rank's part: {pairs}", is_sentence=True)
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
        for dim in dict.fromkeys((0, whole.dim() - 1)) if whole.dim() > 1 else ():
            yield from self._rows(whole, held, wrong, dim)
        yield from _displaced([(held[rank][0].flatten(), want[rank].flatten()) for rank in wrong], same)

    def _rows(self, whole: torch.Tensor, held: Held, wrong: Sequence[int], dim: int) -> Iterator[Reason]:
        """Each row, or column, is another one of the reference."""
        word, texts = ("column" if dim else "row"), []
        for rank in wrong if 0 < whole.shape[dim] <= _MOST_ROWS else ():
            local, part = held[rank]
            rows = part.index[dim]
            mine = torch.arange(whole.shape[dim]) if rows is None else rows
            beside = Part(tuple(None if at == dim else index for at, index in enumerate(part.index))).of(whole)
            have, want = (each.double().movedim(dim, 0).flatten(1) for each in (local, beside))
            near = torch.cdist(have, want).min(1)
            if not is_close(want[near.indices], have, largest(whole), self.tolerance) or torch.equal(
                near.indices, mine
            ):
                return
            off = (near.indices != mine).nonzero()[:, 0]
            first = f"{word} {int(mine[off[0]])} has {word} {int(near.indices[off[0]])} of the reference"
            texts.append(f"{first} ({len(off)} {word}s are others, rank {rank})")
        if texts:
            yield Reason(f"{word}s", "", "; ".join(texts[:2]), is_sentence=True)

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

    def of_pieces(self, wholes: Mapping[str, torch.Tensor], held: Held) -> list[Reason]:
        """Elements of other tensors, as they follow each other in a flat buffer."""
        mine = next(iter(held.values()))[0].flatten()
        if not all(
            part.is_whole and self._is(mine.view_as(local), {0: (local, part)}) for local, part in held.values()
        ):
            return []
        flat, at, said = {name: whole.flatten() for name, whole in wholes.items()}, 0, list[str]()
        while at < len(mine) and len(said) < _MOST_PIECES:
            name, begin, length = self._longest(mine[at:], flat)
            if length < 2 or not mine[at : at + length].any():
                return []
            said.append(f"{name} from {begin} on")
            at += length
        if at < len(mine) or len(mine) <= 2 * len(said):
            return []
        text = f"has the elements of {' and '.join(said)}, as if it were read at a wrong place of a flat buffer"
        return [Reason("displaced", "", text)]

    def _longest(self, mine: torch.Tensor, flat: Mapping[str, torch.Tensor]) -> tuple[str, int, int]:
        """The longest run of elements with which a flat tensor begins: a name, the first element, and the length."""
        best, bound = ("", 0, 0), self.tolerance * largest(mine)
        for name, values in flat.items():
            for begin in (differences(values, mine[:1]) <= bound).nonzero()[:_MOST_DISPLACED, 0].tolist():
                length = min(len(values) - begin, len(mine))
                off = (differences(values[begin : begin + length], mine[:length]) > bound).nonzero()
                length = int(off[0]) if len(off) else length
                best = max(best, (name, begin, length), key=lambda run: run[2])
        return best

    def _is(self, value: torch.Tensor, held: Held) -> bool:
        scale = largest(value)
        return all(is_close(local, part.of(value), scale, self.tolerance) for local, part in held.values())

    def of_loading(self, start: torch.Tensor, held: Held) -> list[Reason]:
        """After loading, ranks have what they had at the start."""
        scale = largest(start)
        not_loaded = {
            rank: is_close(local, part.of(start), scale, self.tolerance) for rank, (local, part) in held.items()
        }
        ranks = [rank for rank, is_so in not_loaded.items() if is_so]
        text = f"is what it was at the start on ranks {listed(ranks)}: what was saved is not loaded there"
        return [Reason("not_loaded", self.differing(not_loaded), text)] if ranks else []

    def of_update(
        self, before: torch.Tensor, after: torch.Tensor, held: Held, is_resumed: bool = False
    ) -> list[Reason]:
        """A step has added a multiple of what it should add, or besides a multiple of the parameter itself.

        `is_resumed`: the multiple may be of a scheduler's steps, and says nothing about axes.
        """
        changes, rests = {}, {}
        for rank, (local, part) in held.items():
            old, new = part.of(before).double(), part.of(after).double()
            changes[rank], rests[rank] = (local.double() - old, new - old), (local.double() - new, old)
        factors = _factors_of_ranks(changes, 1e-5)
        if not factors:
            numbers, axis = self._said(_factors_of_ranks(rests, self.tolerance))
            added = f"beside what the reference adds, the step has added {numbers} times the parameter itself"
            return [Reason("decay", axis, f"{added}: its weight decay is another")] if numbers else []
        numbers, axis = self._said(factors)
        if numbers == "1" or (axis and after.numel() < 2):
            # Of one element, any is a multiple.
            return []
        added = f"what the step has added is {numbers} times that of the reference, and gradients agree"
        if numbers == "0":
            added = "the step does not change it, and gradients agree"
            why = "no optimizer holds it, or what the step wrote is lost"
        elif axis:
            why = f"ranks along {axis} step otherwise, or do not send what they step"
        else:
            one, why = next(iter(factors.values())), "the learning rate, or what scales it"
            known = () if is_resumed else self._known_factors()
            sizes = list(dict.fromkeys(each.axis for n, each in known if each.axis and abs(one - n) < 1e-5 * n))
            axis = sizes[0] if len(sizes) == 1 else ""
            why += f", such as the size of {' or '.join(sizes)}" if sizes else ""
        return [Reason("update", axis, f"{added}: {why}")]

    def of_steps(self, whole: torch.Tensor, held: Held) -> list[Reason]:
        """The number of steps that an optimizer has counted is another."""
        counts, axis = self._said({rank: float(local) for rank, (local, _) in held.items()})
        text = f"the optimizer has counted {counts} steps, and {float(whole):g} in the reference"
        return [Reason("steps", axis, f"{text}: some are taken before, twice or never, or the count is lost")]

    def _said(self, numbers: Mapping[int, float]) -> tuple[str, str]:
        """The numbers of ranks in words, and the axes along which they are not the same."""
        by_text: dict[str, list[int]] = {}
        for rank, number in numbers.items():
            by_text.setdefault(f"{round(number, 9):.6g}", []).append(rank)
        if len(by_text) < 2:
            return "".join(by_text), ""
        first = next(iter(by_text.values()))
        each = [f"{text} (ranks {listed(ranks)})" for text, ranks in by_text.items()]
        return " and ".join(each), self.differing({rank: rank in first for rank in numbers})


def _factors_of_ranks(pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> dict[int, float]:
    """The multiple that each rank has of what it should have; none if one has no multiple. `pairs`: both."""
    found = {}
    for rank, (have, want) in pairs.items():
        factor = factor_of(have, want)
        if not is_close(have, (factor or 0) * want, largest(want) * max(1.0, abs(factor or 0)), tolerance):
            return {}
        if factor is not None:
            found[rank] = factor
    return found


def listed_numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


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
