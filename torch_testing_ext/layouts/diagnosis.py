"""Further facts of a failure: the weight of each sample, and the first module whose values differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from torch_testing_ext.layouts.alignment import Alignment
from torch_testing_ext.layouts.hypotheses import Hypotheses, Reason, factor_of, is_close, subsets
from torch_testing_ext.layouts.layout_findings import LayoutFinding
from torch_testing_ext.layouts.tensor_parts import Held, Part, as_real, differences, largest
from torch_testing_ext.layouts.training_looks import (
    OUTPUT,
    OUTPUT_GRADIENT,
    SAMPLE,
    LayoutRun,
    ProbedCall,
    Setup,
    TensorLook,
)

_MOST_SPANS = 8
_MOST_COLUMNS = 4096
# How often a sample counts that is not used.
_UNUSED = 1e-5
# Reductions that are given in place of a sum.
_OPERATIONS: tuple[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("the largest", "maximum", lambda each: each.amax(0)),
    ("the smallest", "minimum", lambda each: each.amin(0)),
    ("the product", "product", lambda each: each.prod(0)),
)
# Kinds that say where values are wrong, and not by how much.
_MOVED = ("ends", "unlike", "other_part", "rows", "columns", "shifted", "reversed", "not_finite")
_FEWEST_POSITIONS = 3
_AGREES, _SHARES, _DIFFERS, _UNKNOWN = "agrees", "shares", "differs", "unknown"


def weights_of_samples(
    reference: LayoutRun, alone: LayoutRun, aligned: Alignment, chunks: int, only: str = ""
) -> list[Reason]:
    """The weight of each sample of the first batch in the gradients, beside that in the reference.

    `alone`: gradients of each part of a sample. `chunks`: the parts of a sample. `only`: of one parameter.
    """
    names = [name for step, kind, name in reference.looks if (step, kind) == (0, "grad") and only in ("", name)]
    names = [name for name in names if (0, SAMPLE, name) in alone.looks]
    parts = 1 + max((part for part, kind, _ in alone.looks if kind == SAMPLE), default=-1)
    if not names or not parts:
        return []
    wholes = {name: whole for name in names if (whole := aligned.whole((0, "grad", name))) is not None}

    def flat(value: Callable[[str], torch.Tensor | None]) -> torch.Tensor:
        values = [(value(name), whole) for name, whole in wholes.items()]
        return torch.cat([(whole * 0 if each is None else as_real(each)).double().flatten() for each, whole in values])

    one = [flat(lambda name, part=part: alone.of_reference((part, SAMPLE, name))) for part in range(parts)]  # type: ignore[misc]
    # Others have no labels.
    counted = [part for part in range(parts) if bool(one[part].isfinite().all()) and bool(one[part].any())]
    if not counted:
        return []
    basis = torch.stack([one[part] for part in counted], 1)
    if len(basis) <= 2 * len(counted):
        # Of few elements, any is a combination.
        return []
    wanted = _combination(basis, flat(wholes.__getitem__))
    if wanted is None or float(wanted.abs().min()) < 1e-9:
        return []
    held = {name: Held() for name in wholes} | aligned.of_kind(0, "grad")[1]
    have = _combination(basis, flat(lambda name: _assembled(held[name], wholes[name])))
    if have is not None:
        places = _places_of_samples(reference, aligned.run)
        return [_reason_of_counts(counted, (have / wanted).tolist(), chunks, aligned.run.axes, places)]
    if only:
        return []
    alone_of = [
        {name: look for name in wholes if (look := alone.of_reference((p, SAMPLE, name))) is not None} for p in counted
    ]
    factors = dict(zip(counted, wanted.tolist(), strict=True))
    other = _reason_of_operation(reference, aligned, wholes, held, factors, alone_of) if chunks == 1 else None
    if other is not None:
        return [other]
    counts: dict[int, torch.Tensor] = {}
    for rank in aligned.run.ranks:
        mine = {name: of_ranks[rank] for name, of_ranks in held.items() if rank in of_ranks and name in wholes}
        if not mine:
            return []
        columns = [
            torch.cat(
                [part.of(as_real(of[n]) if n in of else wholes[n] * 0).flatten() for n, (_, part) in mine.items()]
            )
            for of in alone_of
        ]
        gradient = torch.cat([local.flatten() for local, _ in mine.values()])
        # Of few elements, any is a combination.
        own = _combination(torch.stack(columns, 1), gradient) if gradient.numel() > 2 * len(columns) else None
        if own is None:
            return []
        counts[rank] = own / wanted
    return _reasons_of_own_samples(aligned.run, counts)


def _reason_of_operation(
    reference: LayoutRun,
    aligned: Alignment,
    wholes: Mapping[str, torch.Tensor],
    held: Mapping[str, Held],
    factors: Mapping[int, float],
    alone: Sequence[Mapping[str, torch.Tensor]],
) -> Reason | None:
    """Gradients of all ranks are reduced by another operation than a sum: what each rank has is that of its samples."""
    rows = rows_of_ranks(reference, aligned.run, 0)
    if set(rows) != set(aligned.run.ranks):
        return None
    of_sample = dict(zip(factors, alone, strict=True))

    def own(rank: int, name: str) -> torch.Tensor:
        shares = [factors[s] * as_real(of_sample[s][name]) for s in rows[rank] if name in of_sample.get(s, {})]
        return sum(shares, wholes[name] * 0)

    for over in subsets(aligned.run.axes):
        groups = [group for group in aligned.run.groups(over) if len(group) > 1]
        if any(len({tuple(rows[rank]) for rank in group}) == 1 for group in groups):
            # Any of these operations gives what each of its ranks has.
            continue
        for words, operation, reduce in _OPERATIONS:
            if groups and all(
                is_close(held[name][rank][0], held[name][rank][1].of(reduced), largest(whole), 1e-7)
                for name, whole in wholes.items()
                for group in groups
                for reduced in [reduce(torch.stack([own(rank, name) for rank in group]))]
                for rank in group
                if rank in held[name]
            ):
                axes = " and ".join(over)
                text = f"is {words} of what ranks along {axes} have of it, and not the sum: a {operation} over {axes}"
                return Reason("operation", " ".join(over), text)
    return None


def rows_of_ranks(reference: LayoutRun, run: LayoutRun, step: int) -> dict[int, list[int]]:
    """The samples of the reference's batch that each rank has, in the order of its microbatches, if it is known."""
    key = (step, "data", "samples")
    whole = reference.of_reference(key)
    if whole is None:
        return {}
    at = {digest: number for number, digest in enumerate(whole.tolist())}
    looks = run.looks.get(key, {})
    rows = {r: [at.get(d, -1) for d in look.local.tolist()] for r, look in looks.items() if look.local is not None}
    return {rank: of_rank for rank, of_rank in rows.items() if of_rank and min(of_rank) >= 0}


def _combination(basis: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """The factor of each column of the basis in a gradient; None if it is no combination of them."""
    basis, gradient = basis.double(), gradient.double()
    if not bool(gradient.isfinite().all()):
        return None
    solution = torch.linalg.lstsq(basis, gradient[:, None], driver="gelsd").solution[:, 0]
    fits = float((basis @ solution - gradient).norm()) <= 1e-5 * float(gradient.norm())
    return solution if fits else None


def _reasons_of_own_samples(run: LayoutRun, counts: dict[int, torch.Tensor]) -> list[Reason]:
    """Each rank's part of the gradients is of its own samples alone: what ranks have of others' parts is lost."""
    used = {rank: of_rank.abs() > _UNUSED for rank, of_rank in counts.items()}
    factors = torch.cat([of_rank[used[rank]] for rank, of_rank in counts.items()])
    factor = float(factors.mean()) if len(factors) else 0.0
    if not factor or not bool((factors - factor).abs().max() < _UNUSED):
        return []
    for over in subsets(run.axes):
        if all(bool((torch.stack([used[rank] for rank in group]).sum(0) == 1).all()) for group in run.groups(over)):
            name, size = " and ".join(over), math.prod(run.axes[axis] for axis in over)
            own = f"each rank's part is of its own samples alone, which count {factor:.4g} for 1 in the reference"
            if abs(factor - size) < _UNUSED:
                return [Reason("missing_mean", " ".join(over), f"{own}: an average over {name} is missing")]
            return [Reason("missing_sum", " ".join(over), f"{own}: a reduction over {name} is missing")]
    return []


def _assembled(held: Held, like: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(like)
    for local, part in held.values():
        part.put(local, whole)
    return whole


def _places_of_samples(reference: LayoutRun, run: LayoutRun) -> dict[str, dict[int, int]]:
    """By axis, and by microbatch, the place of each sample of the first batch, for axes that cut samples."""
    rows, found = rows_of_ranks(reference, run, 0), dict[str, dict[int, int]]()
    for axis in run.axes:
        places = {(row, run.places[rank].get(axis, 0)) for rank, of_rank in rows.items() for row in of_rank}
        if len(places) == len(dict(places)):
            found[axis] = dict(places)
    many = run.microbatches
    if many > 1 and all(len(of_rank) % many == 0 for of_rank in rows.values()):
        each = {row: at * many // len(of_rank) for of_rank in rows.values() for at, row in enumerate(of_rank)}
        found["microbatches"] = each
    return found


def _axis_of_counts(counted: Sequence[int], counts: Sequence[float], places: Mapping[str, Mapping[int, int]]) -> str:
    """The only axis by whose places samples count more or less, if several samples have each place."""
    fitting = []
    for axis, of_sample in places.items():
        if not all(sample in of_sample for sample in counted):
            continue
        by_place: dict[int, list[float]] = {}
        for sample, count in zip(counted, counts, strict=True):
            by_place.setdefault(of_sample[sample], []).append(count)
        if all(len(own) > 1 and max(own) - min(own) < 1e-6 for own in by_place.values()):
            fitting.append(axis)
    return fitting[0] if len(fitting) == 1 else ""


def _reason_of_counts(
    counted: Sequence[int],
    counts: Sequence[float],
    chunks: int,
    axes: Mapping[str, int],
    places: Mapping[str, Mapping[int, int]],
) -> Reason:
    spans: list[tuple[int, int, float, int]] = []
    for part, value in sorted(zip(counted, counts, strict=True), key=lambda pair: (pair[0] % chunks, pair[0])):
        sample, chunk = divmod(part, chunks)
        if spans and abs(spans[-1][2] - value) < 1e-6 and spans[-1][3] == chunk:
            spans[-1] = (spans[-1][0], sample, value, chunk)
        else:
            spans.append((sample, sample, value, chunk))
    said = []
    for first, last, value, chunk in spans[:_MOST_SPANS]:
        where = f" in part {chunk} of the sequence" if chunks > 1 else ""
        said.append(
            f"{first if first == last else f'{first}-{last}'}{where} {value if abs(value) > _UNUSED else 0:.4g}"
        )
    averages = "parts that count other than by their sizes, as in an average of averages"
    why = averages if min(counts) > 1e-6 else "samples that are left out or counted twice"
    again = next((over for over in subsets(axes) if _are_one_or(math.prod(axes[axis] for axis in over), counts)), ())
    if again:
        why = f"those that count {max(counts):.4g} are summed over {' and '.join(again)} once too often"
    text = f"samples count in it, for 1 in the reference: {', '.join(said)} ({why})"
    axis = " ".join(again) or (_axis_of_counts(counted, counts, places) if chunks == 1 < len(spans) else "")
    if axis and not again:
        text += f"; it depends on the {'microbatch' if axis == 'microbatches' else f'place along {axis}'} alone"
    return Reason("weighted" if len(spans) > 1 else "scaled", axis, text)


def _are_one_or(size: int, counts: Sequence[float]) -> bool:
    """Whether some samples count as in the reference, and all others this much."""
    ones = [abs(count - 1) < _UNUSED for count in counts]
    others = [count for count, is_one in zip(counts, ones, strict=True) if not is_one]
    return any(ones) and bool(others) and all(abs(count - size) < _UNUSED for count in others)


class ModuleSearch:
    """The first module whose output, or the gradient of that, differs, in the order of the reference."""

    def __init__(self, reference: LayoutRun, run: LayoutRun, setup: Setup, step: int, aligned: Alignment):
        self._aligned = aligned
        self.reference, self.run, self.setup, self.step = reference, run, setup, step
        self._rows = rows_of_ranks(reference, run, step)
        self._hypotheses = Hypotheses(run.axes, run.places, run.microbatches)
        self._data_ranks = math.prod(size for axis, size in run.axes.items() if axis in setup.data)

    def add_to(self, finding: LayoutFinding, wrong: set[str]) -> None:
        """Say in a finding where values first differ, with the calls in between. `wrong`: the kinds that are."""
        ways = [(OUTPUT, "forward", "the output"), (OUTPUT_GRADIENT, "backward", "the gradient of the output")]
        if "loss" not in wrong and any(key[:2] == (self.step, "loss") for key in self.run.looks):
            # The forward is right: an output that seems wrong is cut in a way that is not known.
            del ways[0]
        agreeing = 0
        for kind, direction, what in ways:
            last, fine, unsure = "", 0, 0
            for name in self._names(kind):
                verdict = self._verdict(kind, name)
                if verdict == _DIFFERS:
                    self._tell(finding, kind, direction, what, name, last)
                    return
                fine, unsure = fine + (verdict != _UNKNOWN), unsure + (verdict == _UNKNOWN)
                last = last if verdict == _UNKNOWN else name
            if fine:
                more = f" ({unsure} cannot be compared)" if unsure else ""
                finding.notes.append(f"in {direction}, {what} agrees in {fine} modules{more}")
                agreeing += not unsure
        if "loss" in wrong and "grad" not in wrong:
            finding.notes.append("all gradients of this step agree: only the number is wrong")
        elif "grad" in wrong and agreeing == len(ways) and not finding.is_explained:
            after = "how gradients of parameters are computed from these, reduced, scaled or kept"
            finding.notes.append(f"so it is what comes after: {after}")

    def add_place_of_reduction(self, finding: LayoutFinding) -> None:
        """Say between which modules gradients become shares of ranks, which nothing sums on the way to a parameter."""
        module, whole, shares = finding.name.rpartition(".")[0], "", ""
        for name in self._names(OUTPUT_GRADIENT):
            verdict = self._verdict(OUTPUT_GRADIENT, name)
            if verdict == _AGREES:
                whole, shares = name, ""
            elif verdict == _SHARES:
                shares = shares or name
            elif verdict == _DIFFERS:
                return
            if name == module:
                break
        else:
            return
        if shares and whole:
            from_there = f"going back, the gradient of the output of {shares} has only a share on each rank"
            note = f"{from_there}, and that of {whole} agrees: the reduction is missing in between"
            finding.notes.append(note)

    def _tell(self, finding: LayoutFinding, kind: str, direction: str, what: str, name: str, last: str) -> None:
        after = f"; after that of {last}, which agrees" if last else ""
        finding.notes.append(f"first wrong in {direction}: {what} of {name or 'the model'}{after}")
        if kind == OUTPUT_GRADIENT and not last:
            if not finding.is_explained:
                finding.reasons += self._counts_in_loss(name)
            finding.notes.append("so it is the loss, or what it is given beside the model's output, such as labels")
        if not finding.is_explained:
            finding.reasons += self._reasons(kind, f"{what} of {name or 'the model'}", name)
        calls = [call.text for call in self._calls(0, kind, last, name)]
        finding.notes.append(f"  rank 0 calls in between: {', '.join(calls[-3:]) or 'none'}")
        for rank in self.run.ranks:
            called = self._calls(rank, kind, last, name)
            site = next((call.site for call in reversed(called) if call.site is not None), None)
            if site is not None:
                finding.sites[rank] = site

    def _reasons(self, kind: str, title: str, name: str) -> list[Reason]:
        """The first hypothesis that fits the activation which is wrong."""
        whole, looks = self.reference.of_reference((self.step, kind, name)), self.run.looks[self.step, kind, name]
        held = None if whole is None else self._held(whole, looks)
        if whole is None or held is None:
            return []
        for factor in dict.fromkeys((1, self._data_ranks) if kind == OUTPUT_GRADIENT else (1,)):
            found = self._at_ends(factor * whole, held) or self._hypotheses.of_tensor(factor * whole, held)
            if whole.dim() > 2 and all(reason.is_vague for reason in found):
                found = [
                    each
                    for each in self._hypotheses.of_tensor(*_by_tokens(factor * whole, held))
                    if each.kind == "rows"
                ] or found
            # How much a rank's loss counts beside that of the reference is not known.
            for reason in (each for each in found if factor == self._data_ranks == 1 or each.kind in _MOVED):
                return [replace(reason, text=f"{title}{':' if reason.is_sentence else ''} {reason.text}")]
        return []

    def _at_ends(self, whole: torch.Tensor, held: Held) -> list[Reason]:
        """Say which positions are wrong, if they are only those at the ends of what ranks have."""
        positions: dict[int, list[int]] = {}
        said, wrong = list[str](), set[int]()
        for rank, (local, part) in held.items():
            rows = part.index[1] if len(part.index) > 1 else None
            if rows is None or len(rows) < _FEWEST_POSITIONS:
                return []
            positions[rank] = rows.tolist()
            off = differences(local, part.of(whole)) > 1e-7 * largest(whole)
            right = (~off.movedim(1, 0).flatten(1).any(1)).nonzero()[:, 0].tolist()
            if not right or len(right) != 1 + right[-1] - right[0]:
                return []
            own = positions[rank][: right[0]] + positions[rank][right[-1] + 1 :]
            said += [f"{', '.join(map(str, own))} (rank {rank})"] if own else []
            wrong |= {*own}
        axis = self._hypotheses.differing({rank: tuple(rows) for rank, rows in positions.items()})
        if not wrong or not axis:
            return []
        where = f"the ends of what ranks along {' and '.join(axis.split())} have"
        if wrong <= {0, whole.shape[1] - 1}:
            where += ", where no rank is beside"
        return [Reason("ends", axis, f"differs only at positions {' and '.join(said)}: {where}")]

    def _names(self, kind: str) -> list[str]:
        order = self.reference.ranks[0].order
        names = dict.fromkeys(event[1] for event in order if not isinstance(event, ProbedCall) and event[0] == kind)
        return [name for name in names if (self.step, kind, name) in self.run.looks]

    def _calls(self, rank: int, kind: str, last: str, name: str) -> list[ProbedCall]:
        """The collectives of a rank between one module and another."""
        found, is_between = list[ProbedCall](), not last
        for event in self.run.ranks[rank].order:
            if isinstance(event, ProbedCall):
                found += [event] if is_between else []
            elif event == (kind, name) and is_between:
                break
            elif event == (kind, last):
                is_between, found = True, []
        return found

    def _verdict(self, kind: str, name: str) -> str:
        """Whether these are a cut, or shares, of the reference's activation, by samples and whichever axis fits."""
        whole = self.reference.of_reference((self.step, kind, name))
        looks = self.run.looks[self.step, kind, name]
        if whole is None or self._aligned.is_renamed(name):
            return _UNKNOWN
        held = self._held(whole, looks)
        if held is None:
            return _UNKNOWN
        want = {rank: part.of(whole) for rank, (_, part) in held.items()}
        beside = {rank: self._of_samples(whole, rank, local).of(whole) for rank, (local, _) in held.items()}
        have = {rank: local for rank, (local, _) in held.items()}
        scale = largest(whole) or 1.0
        for factor in {1, self._data_ranks} if kind == OUTPUT_GRADIENT else {1}:

            def same(rank: int, value: torch.Tensor, factor: int = factor) -> bool:
                return is_close(value, factor * want[rank], scale * factor, 1e-7)

            if all(same(rank, value) for rank, value in have.items()):
                return _AGREES
            if all(_has_columns(value, factor * beside[rank], scale * factor) for rank, value in have.items()):
                return _AGREES
            for axis in (each for each in self.run.axes if each not in self.setup.data):
                groups = self.run.groups([axis], list(have))
                if all(same(group[0], torch.stack([have[r] for r in group]).sum(0)) for group in groups):
                    return _SHARES
                # Of a table whose rows are cut, each rank looks up its own, and something else for those of others.
                near = {r: differences(value, factor * want[r]) <= 1e-7 * scale * factor for r, value in have.items()}
                rows = [torch.stack([near[rank].all(-1).flatten() for rank in group]) for group in groups]
                if all(bool((each.sum(0) == 1).all() and each.any(1).all()) for each in rows):
                    return _SHARES
        return _DIFFERS

    def _held(self, whole: torch.Tensor, looks: Mapping[int, TensorLook]) -> Held | None:
        """The parts that ranks have, by samples, positions, and the axes that explain a smaller dimension."""
        held: Held = {}
        for rank, look in looks.items():
            if look.local is None:
                return None
            part = self._of_features(self._of_samples(whole, rank, look.local), whole, rank, look.local)
            if part is None:
                return None
            held[rank] = look.local, part
        return held

    def _of_samples(self, whole: torch.Tensor, rank: int, local: torch.Tensor) -> Part:
        """The samples and positions of an activation that a rank has."""
        index: list[torch.Tensor | None] = [None] * whole.dim()
        rows = self._rows.get(rank) or next(self._rows_beside(rank), None)
        if rows and whole.dim() and local.dim() and local.shape[0] == len(rows) <= whole.shape[0]:
            index[0] = torch.tensor(rows)
        for dim, axes in enumerate((self.setup.data, self.setup.sequence)):
            for axis in (each for each in self.run.axes if each in axes):
                if dim < min(whole.dim(), local.dim()):
                    self._cut(index, whole, dim, axis, rank, local.shape[dim])
        return Part(tuple(index))

    def _cut(
        self, index: list[torch.Tensor | None], whole: torch.Tensor, dim: int, axis: str, rank: int, size: int
    ) -> None:
        """Leave a rank's chunk along an axis of what it has of a dimension, if it has more than `size`."""
        rows = index[dim]
        known = torch.arange(whole.shape[dim]) if rows is None else rows
        if len(known) > size:
            index[dim] = known.chunk(self.run.axes[axis])[self.run.places[rank][axis]]

    def _of_features(self, part: Part, whole: torch.Tensor, rank: int, local: torch.Tensor) -> Part | None:
        """Its equal part along whichever axis explains a smaller dimension."""
        index = list(part.index)
        for dim in range(min(whole.dim(), local.dim())):
            for axis, size in self.run.axes.items():
                rows = index[dim]
                have = whole.shape[dim] if rows is None else len(rows)
                if axis not in self.setup.data and have == size * local.shape[dim]:
                    self._cut(index, whole, dim, axis, rank, local.shape[dim])
        found = Part(tuple(index))
        return found if found.of(whole).shape == local.shape else None

    def _rows_beside(self, rank: int) -> Iterator[list[int]]:
        """The samples of other stages and shards, which are those of this rank."""
        for group in self.run.groups(["pp", "tp"]):
            if rank in group:
                yield from (self._rows[other] for other in group if other in self._rows)

    def _counts_in_loss(self, name: str) -> list[Reason]:
        """The gradient of the model's output is, sample by sample, a multiple of the reference's."""
        key = (self.step, OUTPUT_GRADIENT, name)
        whole = self.reference.of_reference(key)
        factors: dict[int, float] = {}
        for rank, look in self.run.looks[key].items():
            if whole is None or look.local is None:
                return []
            for row, sample in zip(look.local.double(), self._rows.get(rank, []), strict=False):
                wanted = whole[sample].double()
                factor = factor_of(row, wanted) if row.shape == wanted.shape else None
                if factor is None or not is_close(row, factor * wanted, largest(wanted) * max(1.0, abs(factor)), 1e-6):
                    return []
                factors[sample] = factor
        values = sorted(factors.values())
        if len(values) < 2 or values[-1] - values[0] < 1e-6 * abs(values[-1]):
            return []
        by_value: dict[float, list[int]] = {}
        for sample, value in sorted(factors.items()):
            by_value.setdefault(round(value / self._data_ranks, 5), []).append(sample)
        said = [f"{', '.join(map(str, samples))}: {value:.4g}" for value, samples in by_value.items()]
        text = f"samples count in the loss, beside the reference and up to one factor: {'; '.join(said[:_MOST_SPANS])}"
        return [Reason("weighted", "", text)]


def _by_tokens(whole: torch.Tensor, held: Held) -> tuple[torch.Tensor, Held]:
    """An activation as one row for each position of each sample."""
    numbers = torch.arange(math.prod(whole.shape[:-1])).view(whole.shape[:-1])
    rows = {
        rank: (local.flatten(0, -2), Part((Part(part.index[:-1]).of(numbers).flatten(), part.index[-1])))
        for rank, (local, part) in held.items()
    }
    return whole.flatten(0, -2), rows


def _has_columns(local: torch.Tensor, whole: torch.Tensor, scale: float) -> bool:
    """Whether each feature of an activation is one of the reference's: fused weights are cut into several parts."""
    if not 1 < local.dim() == whole.dim() or local.shape[:-1] != whole.shape[:-1]:
        return False
    if not 0 < local.shape[-1] < whole.shape[-1] <= _MOST_COLUMNS:
        return False
    mine, features = (each.double().flatten(0, -2).t() for each in (local, whole))
    near = torch.cdist(mine, features, p=math.inf).min(1)
    return len(set(near.indices.tolist())) == local.shape[-1] and float(near.values.max()) <= 1e-7 * scale
