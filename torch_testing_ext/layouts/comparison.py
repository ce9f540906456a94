"""Compares a run of a layout with the reference, in the order in which a step makes its values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from torch_testing_ext.layouts.alignment import Alignment
from torch_testing_ext.layouts.hypotheses import (
    TOLERANCE,
    Hypotheses,
    Reason,
    factor_of,
    is_close,
    listed,
)
from torch_testing_ext.layouts.layout_findings import LayoutFinding, LayoutReport
from torch_testing_ext.layouts.norm_hypotheses import reasons_for_norm
from torch_testing_ext.layouts.tensor_parts import Held, as_real, differences, finite, largest
from torch_testing_ext.layouts.training_looks import LABELS, LOAD, ORDER, Key, LayoutRun, Setup

# Of the largest element of its kind: below, a tensor counts as zero.
_NOTHING = 1e-13
# Of the largest gradient: what is below is rounding alone.
_NOISE = 1e-10
# In low precision: a difference may be so many times what one rounding error in each weight makes.
_MOST_ROUNDING = 6.0
_NUMBERS = ("loss", "value", "norm")
_AFTER_GRADIENTS = ("clipped", "param", "state", "buffer")

# "sum" or "average", and the axes over which it gives the number of all.
Law = tuple[str, tuple[str, ...]]


class Comparison:
    """One run beside the reference. `controls`: runs of the reference with rounding errors, for low precision."""

    def __init__(self, reference: LayoutRun, run: LayoutRun, setup: Setup, controls: Sequence[LayoutRun] = ()):
        self.reference, self.run, self.setup, self.controls = reference, run, setup, controls
        self.is_resumed = setup.phase == LOAD
        at = (setup.first_step - 1, "param") if self.is_resumed else (-1, "start")
        self.aligned = Alignment(reference, run, *at)
        unit = setup.unit if controls else 0.0
        self.hypotheses = Hypotheses(run.axes, run.places, run.microbatches, unit)
        self.report = LayoutReport(run.text, not_compared=self.aligned.not_compared, seconds=run.seconds)
        # How each number follows from those of ranks, by its name: learnt in the first step.
        self._laws: dict[str, Law] = {}
        # Numbers that follow otherwise than the loss: a reason for wrong gradients, if there are such.
        self._doubts: list[LayoutFinding] = []
        self._noise = self._parameters_of_noise() if not controls else set()

    def judge(self) -> LayoutReport:
        """Search the first step that has something wrong: as far as gradients and norm, then later kinds."""
        found: list[LayoutFinding] = []
        points = sorted(
            {(step, kind) for step, kind, _ in self.run.looks if kind in ORDER},
            key=lambda point: (point[0], ORDER.index(point[1])),
        )
        for step, kind in points:
            # States may say why a parameter is wrong.
            is_late = kind in _AFTER_GRADIENTS and bool(found) and (found[-1].kind, kind) != ("param", "state")
            if found and (step != found[0].step or is_late):
                break
            labels = self.reference.of_reference((step, LABELS, LABELS))
            self.hypotheses.labels = (0, 0) if labels is None else (int(labels[0]), int(labels[1]))
            finding = self._find(step, kind)
            if finding is not None:
                found.append(finding)
                if kind in ("start", "data", "dropout"):
                    break
        self._note_what_is_not_recorded()
        if found:
            found += [doubt for doubt in self._doubts if doubt.step == found[0].step]
            # A loss that differs says little by itself.
            first = next((each for each in found if each.is_explained), found[0])
            self.report.finding, self.report.others = first, [each for each in found if each is not first]
            return self.report
        self.report.refusal = self._what_is_wrong_with_the_test()
        return self.report

    def _note_what_is_not_recorded(self) -> None:
        """Numbers that only the reference has recorded."""
        names = {(kind, name) for _, kind, name in self.run.looks}
        for _, kind, name in self.reference.looks:
            if kind in _NUMBERS and (kind, name) not in names:
                self.report.not_compared[name] = "no rank has recorded it"

    def _find(self, step: int, kind: str) -> LayoutFinding | None:
        keys = [key for key in self.run.looks if key[:2] == (step, kind)]
        if kind == "data":
            return self._samples(step)
        if kind == "dropout":
            return self._dropout(step, keys)
        if kind in _NUMBERS:
            return next(filter(None, (self._number(key) for key in keys)), None)
        is_loaded = self._is_loaded(step)
        are_first = kind == "start" or (kind == "param" and is_loaded)
        finding = self._misplaced(step, kind) if are_first else None
        finding = finding or self._tensors(step, kind)
        if finding is None and are_first:
            uncovered = next(self.aligned.uncovered(), None)
            if uncovered is not None:
                finding = LayoutFinding(step, kind, uncovered[0], [Reason("uncovered", "", uncovered[1])])
        if finding is None and is_loaded and kind == "param":
            finding = self._lost_states(step)
        if finding is not None:
            finding.is_after_loading = is_loaded
        return finding

    def _is_loaded(self, step: int) -> bool:
        """Whether the parameters of a step are those that were loaded."""
        return self.is_resumed and step == self.setup.first_step - 1

    def _misplaced(self, step: int, kind: str) -> LayoutFinding | None:
        """Weights that ranks have in the place of others: they are found by their content."""
        of_ranks = self.aligned.misplaced
        names = list(dict.fromkeys(name for name, _ in of_ranks))
        if not names:
            return None
        ranks = [rank for name, rank in of_ranks if name == names[0]]
        others = " and ".join(dict.fromkeys(of_ranks[names[0], rank] for rank in ranks))
        axis = self.hypotheses.differing({rank: rank not in ranks for rank in self.run.ranks})
        reason = Reason("other_tensor", axis, f"is {others} of the reference on ranks {listed(ranks)}")
        return LayoutFinding(step, kind, names[0], [reason], names, len(self.aligned.starts), 1.0)

    def _lost_states(self, step: int) -> LayoutFinding | None:
        """States of the optimizer that the reference has, and no rank has after loading."""
        had = {name for at, kind, name in self.reference.looks if (at, kind) == (step, "state")}
        keys = [key for key in self.run.looks if key[:2] == (step, "state")]
        have = {name for key in keys for name in self.aligned.held(key)}
        lost = sorted(had - have - set(self.aligned.not_compared))
        if not lost:
            return None
        which = "its states" if not have else f"{len(lost)} of {len(had)} states"
        reason = Reason("state_lost", "", f"the optimizer has lost {which}, such as {lost[0]}: it begins anew")
        return LayoutFinding(step, "state", "the optimizer's state", [reason], lost, len(had))

    # -- tensors

    def _tensors(self, step: int, kind: str) -> LayoutFinding | None:
        wholes, held = self.aligned.of_kind(step, kind)
        sizes: dict[str, float] = {}
        for name, whole in wholes.items():
            sizes[_group(kind, name)] = max(sizes.get(_group(kind, name), 0.0), largest(whole))
        wrong: dict[str, float] = {}
        for name, of_ranks in held.items():
            off = self._off((step, kind, name), wholes[name], of_ranks, sizes[_group(kind, name)])
            if off and kind in ("param", "state") and name.rpartition(" of ")[2] in self._noise:
                reason = "its gradient is zero but for rounding, which the optimizer has enlarged"
                self.report.not_compared[name] = reason
                continue
            self.report.compared += 1
            if off:
                wrong[name] = off
        if not wrong:
            return None
        return self._explained(step, kind, wholes, held, wrong)

    def _off(self, key: Key, whole: torch.Tensor, held: Held, of_kind: float) -> float:
        """The relative error of a tensor; 0 if it is right."""
        if self.controls:
            controls = [as_real(each) for control in self.controls if (each := control.of_reference(key)) is not None]
            ratio = _rounding_ratio(whole, held, controls, of_kind, self.setup.unit)
            self.report.worst = max(self.report.worst, ratio)
            return 0.0 if ratio <= _MOST_ROUNDING else ratio
        scale = max(largest(whole), _NOTHING / TOLERANCE * of_kind, 1e-30)
        off = 0.0
        for local, part in held.values():
            far = differences(local, part.of(whole))
            difference = float(far.max()) if far.numel() else 0.0
            off = max(off, difference) if difference == difference else math.inf
        return 0.0 if off <= TOLERANCE * scale else off / scale

    def _explained(
        self, step: int, kind: str, wholes: dict[str, torch.Tensor], held: dict[str, Held], wrong: dict[str, float]
    ) -> LayoutFinding:
        names = [name for name in held if name in wrong]
        if kind != "state":
            names = [name for name in self.aligned.starts if name in wrong] or names
        if kind in ("grad", "clipped"):
            # A backward pass goes from the last to the first.
            names.reverse()
        best, reasons = names[0], list[Reason]()
        for name in names:
            reasons = self._reasons(step, kind, name, wholes, held[name])
            if reasons:
                best = name
                break
        if kind in ("grad", "clipped") and reasons and reasons[0].is_vague and len(wrong) > 0.9 * len(held):
            reasons = self._of_norm(step, kind, wholes, held, best) or reasons
        finding = LayoutFinding(step, kind, best, reasons, names, len(held), wrong[best])
        is_shared = any(reason.kind.startswith("missing") for reason in reasons)
        finding.shares = _shares(wholes[best], held[best], self.hypotheses.tolerance, is_shared)
        if best != names[0]:
            finding.notes.append(f"{names[0]}, nearer to the loss, differs too, but no simple rule explains it")
        return finding

    def _reasons(self, step: int, kind: str, name: str, wholes: dict[str, torch.Tensor], held: Held) -> list[Reason]:
        whole = wholes[name]
        if kind == "state" and name.startswith("step of "):
            return self.hypotheses.of_steps(whole, held)
        reasons = self.hypotheses.of_tensor(whole, held)
        says_little = not reasons or reasons[0].kind == "unlike"
        if kind == "param" and says_little and self._is_loaded(step):
            start = self.aligned.whole((-1, "start", name))
            reasons = (self.hypotheses.of_loading(start, held) if start is not None else []) or reasons
        elif kind == "param" and says_little:
            before = self.aligned.whole((step - 1, "param" if step else "start", name))
            reasons = (
                self.hypotheses.of_update(before, whole, held, self.is_resumed) if before is not None else []
            ) or reasons
        if kind == "grad" and step and (says_little or reasons[0].is_vague):
            before = self.aligned.whole((step - 1, "grad", name))
            reasons = (self.hypotheses.of_earlier(whole, before, held) if before is not None else []) or reasons
        if kind in ("start", "param", "grad", "state") and (not reasons or reasons[0].kind == "unlike"):
            reasons = self.hypotheses.of_others(name, wholes, held) or reasons
            if not reasons and not self.controls:
                reasons = self.hypotheses.of_pieces(wholes, held)
        if kind == "grad" and (not reasons or reasons[0].is_vague):
            reasons = self._of_copies(step, name, whole, held) or reasons
        return reasons

    def _of_copies(self, step: int, name: str, whole: torch.Tensor, held: Held) -> list[Reason]:
        """Ranks have two parameters in the place of one of the reference, whose gradients together are right."""
        copies = {rank: self.aligned.copies(name, rank) for rank in held}
        if not all(len(names) > 1 for names in copies.values()):
            return []
        for rank, (_, part) in held.items():
            locals_ = [self.run.looks[step, "grad", each][rank].local for each in copies[rank]]
            known = [each.double() for each in locals_ if each is not None]
            if not known or not is_close(sum(known[1:], known[0]), part.of(whole), largest(whole), TOLERANCE):
                return []
        names = " and ".join(next(iter(copies.values())))
        text = f"{names} are one parameter of the reference; the sum of their gradients is right: they are not tied"
        return [Reason("untied", "", text)]

    def _of_norm(
        self, step: int, kind: str, wholes: dict[str, torch.Tensor], held: dict[str, Held], name: str
    ) -> list[Reason]:
        """All clipped gradients have one factor in each rank: the reasons for which a norm is that much off."""
        ratios = {}
        for rank, (local, part) in held[name].items():
            factor = factor_of(local, part.of(wholes[name]))
            if not factor:
                return []
            ratios[rank] = 1 / factor
        return reasons_for_norm(self.hypotheses, wholes, held, ratios)

    def _parameters_of_noise(self) -> set[str]:
        """Parameters whose gradient would be zero, were it not for rounding: a key's bias before a softmax."""
        sizes = {
            (step, name): largest(look[0].local)
            for (step, kind, name), look in self.reference.looks.items()
            if kind == "grad" and look[0].local is not None
        }
        most = max(sizes.values(), default=0.0)
        return {name for (_, name), size in sizes.items() if 0 < size < _NOISE * most}

    # -- numbers

    def _number(self, key: Key) -> LayoutFinding | None:
        kind, name = key[1:]
        whole = self.reference.of_reference(key)
        if whole is None:
            self.report.not_compared[name] = "the reference has not recorded it"
            return None
        wanted = float(whole.double().sum())
        have = self._values(key)
        self.report.compared += 1
        if not have:
            return None
        bound = TOLERANCE * max(abs(wanted), 1e-12)
        if self.controls:
            moved = [float(each.double().sum()) for c in self.controls if (each := c.of_reference(key)) is not None]
            bound = _MOST_ROUNDING * max([abs(each - wanted) for each in moved] + [self.setup.unit * abs(wanted)])

        def right(value: float) -> bool:
            return abs(value - wanted) <= bound

        if all(map(right, have.values())):
            return None
        is_count = not any(
            look.local.is_floating_point() for look in self.run.looks[key].values() if look.local is not None
        )
        if kind != "norm":
            laws = [law for law, values in self._laws_of(have, is_count) if all(map(right, values))]
            known = self._laws.setdefault(name, laws[0]) if laws else None
            if known in laws:
                self._doubts += [] if is_count else self._other_law(key, known)
                return None
        reasons: list[Reason] = []
        if kind == "norm" and wanted:
            ratios = {rank: value / wanted for rank, value in have.items()}
            reasons = reasons_for_norm(self.hypotheses, *self.aligned.of_kind(key[0], "grad"), ratios)
        reasons = reasons or self.hypotheses.of_number(wanted, have)
        if not reasons and kind == "value":
            differ = [axis for axis in self.run.axes if self._differs_along(axis, have)]
            text = f"ranks along {' and '.join(differ)} have different numbers, whose sum and average are others, too"
            reasons = [Reason("unlike", " ".join(differ), text)] if differ else []
        off = max(abs(value - wanted) for value in have.values()) / max(abs(wanted), 1e-30)
        shares = {rank: f"had {value:.8g}, the reference {wanted:.8g}" for rank, value in have.items()}
        return LayoutFinding(key[0], kind, name, reasons, [name], 1, off, shares)

    def _values(self, key: Key) -> dict[int, float]:
        """A number of each rank; of pipelines only those of the last stage."""
        looks, last = self.run.looks[key], self.run.axes.get("pp", 1) - 1
        values = {}
        for rank, look in looks.items():
            if look.local is None:
                continue
            if look.part is not None and look.part.partial:
                members = look.part.partial[0]
                values[rank] = sum(float(each) for m in members if (each := looks[m].local) is not None)
            elif key[1] == "norm" or self.run.places[rank].get("pp", 0) == last:
                values[rank] = float(look.local.double().sum())
        return values

    def _laws_of(self, have: dict[int, float], is_count: bool) -> list[tuple[Law, list[float]]]:
        """Ways in which the reference's number may follow from those of ranks, with the value of each group.

        Ranks that have the same number have no shares of one, but for counts: it was divided by the size of an axis.
        """
        axes = [axis for axis in self.run.axes if axis in (*self.setup.data, *self.setup.sequence)]
        axes = [axis for axis in axes if is_count or self._differs_along(axis, have)]
        found: list[tuple[Law, list[float]]] = []
        for over in (each for n in range(1, len(axes) + 1) for each in itertools.combinations(axes, n)):
            sums = [sum(have[rank] for rank in group) for group in self.run.groups(over, list(have))]
            size = math.prod(self.run.axes[axis] for axis in over)
            found += [(("sum", over), sums), (("average", over), [value / size for value in sums])]
        return found

    def _other_law(self, key: Key, law: Law) -> Iterator[LayoutFinding]:
        """A number that adds up where the loss is averaged, or the reverse."""
        of_loss = self._laws.get("loss", law)
        if of_loss[0] == law[0] or of_loss[1] != law[1]:
            return
        size, axes = self.hypotheses.size(law[1]), " and ".join(law[1])
        kind, factor = ("divided", f"1/{size} of") if law[0] == "sum" else ("times", f"{size} times")
        text = f"its {law[0]} over {axes} is the reference, and of the loss the {of_loss[0]} is: it counts {factor} it"
        reasons = [Reason(kind, " ".join(law[1]), text)]
        yield LayoutFinding(*key, reasons, [key[2]], 1, 1.0)

    def _differs_along(self, axis: str, have: dict[int, float]) -> bool:
        groups = self.run.groups([axis], list(have))
        return any(not math.isclose(have[r], have[group[0]], rel_tol=TOLERANCE) for group in groups for r in group)

    # -- samples and dropout

    def _samples(self, step: int) -> LayoutFinding | None:
        """Over the data axes together, each sample of the reference's step must be used once."""
        key = (step, "data", "samples")
        whole = self.reference.of_reference(key)
        if any(self.run.axes.get(axis, 1) > 1 for axis in self.setup.sequence):
            self.report.not_compared["the samples"] = "a sequence axis cuts them"
            return None
        if whole is None:
            return None
        rows = {rank: look.local.tolist() for rank, look in self.run.looks[key].items() if look.local is not None}
        axes = [axis for axis in self.run.axes if axis in self.setup.data]
        want = Counter(whole.tolist())
        self.report.compared += 1
        for group in self.run.groups(axes, list(rows)):
            have: Counter[int] = Counter()
            for rank in group:
                have.update(rows[rank])
            if have != want:
                more, never = sum((have - want).values()), sum((want - have).values())
                used = f"{never} {_be(never)} not used, and {more} {_be(more)} used too often"
                text = f"of {sum(want.values())} samples of the reference, {used}"
                if len({tuple(rows[rank]) for rank in group}) == 1 < len(group):
                    text += f"; ranks {listed(group)} have the same ones"
                return LayoutFinding(step, "data", "samples", [Reason("samples", " ".join(axes), text)])
        return None

    def _dropout(self, step: int, keys: Sequence[Key]) -> LayoutFinding | None:
        """Along axes that cut no samples, ranks with the same input must draw the same mask, others must not."""
        whole = (*self.setup.data, *self.setup.sequence, "pp")
        for key in keys:
            notes = {
                rank: tuple(look.local.tolist()) for rank, look in self.run.looks[key].items() if look.local is not None
            }
            for axis in (each for each in self.run.axes if each not in whole):
                for group in self.run.groups([axis], list(notes)):
                    inputs, masks = {notes[rank][0] for rank in group}, {notes[rank][1] for rank in group}
                    if len(inputs) == 1 < len(masks):
                        text = f"ranks along {axis} have the same input and drop other elements of it"
                        return LayoutFinding(step, "dropout", key[2], [Reason("dropout_unlike", axis, text)])
                    says_something = all(notes[rank][2] for rank in group)
                    if len(inputs) == len(group) > 1 == len(masks) and says_something:
                        text = f"ranks along {axis} have different parts and drop the same elements of each"
                        return LayoutFinding(step, "dropout", key[2], [Reason("dropout_alike", axis, text)])
        return None

    # -- whether a green would say something

    def _what_is_wrong_with_the_test(self) -> str:
        if not self.report.compared:
            return f"{self.run.text}: nothing could be compared: call layout.step, or layout.watch"
        if self.run.steps != self.reference.steps and self.setup.end_step is None:
            mine, other = self.run.steps - 1, self.reference.steps - 1
            return f"{self.run.text} stopped after step {mine}, the reference after step {other}"
        for axis, size in self.run.axes.items():
            if size > 1 and not self._cuts(axis):
                return f"{axis}={size} cuts nothing: its ranks have the same samples and the same parameters"
        return ""

    def _cuts(self, axis: str) -> bool:
        """Whether samples, parameters, their names, a loss or what ranks hand over differ along an axis."""
        looks = {key: of for key, of in self.run.looks.items() if key[1] in ("data", "start", "param", "loss", "value")}
        for group in self.run.groups([axis]):
            for of_ranks in looks.values():
                seen = [look.local for rank in group if (look := of_ranks.get(rank)) is not None]
                if any(local is None for local in seen) or len(seen) not in (0, len(group)):
                    return True
                first = seen[0] if seen else None
                if any(local is not None and first is not None and not torch.equal(local, first) for local in seen):
                    return True
            given = [self.run.ranks[rank].given for rank in group]
            if any(other.get(members, digest) != digest for other in given for members, digest in given[0].items()):
                return True
        return False


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _group(kind: str, name: str) -> str:
    """The states of one key have one size; those of another may have another."""
    return name.partition(" of ")[0] if kind == "state" else ""


def _rounding_ratio(
    whole: torch.Tensor, held: Held, controls: Sequence[torch.Tensor], of_kind: float, unit: float
) -> float:
    """The difference as a multiple of what one rounding error in each weight makes."""

    def root(tensor: torch.Tensor) -> float:
        return float(tensor.pow(2).mean().sqrt()) if tensor.numel() else 0.0

    floor = unit * max(root(finite(whole)), 1e-3 * unit * of_kind) + 1e-30
    moved = max([root(differences(control, whole)) for control in controls], default=0.0)
    worst = max(root(differences(local, part.of(whole))) for local, part in held.values())
    return worst / max(moved, floor) if worst == worst else math.inf


def _shares(whole: torch.Tensor, held: Held, tolerance: float, explained: bool) -> dict[int, str]:
    """Describe each rank's share of its part of the reference. `explained`: they have shares of it."""
    found = {}
    scale = largest(whole) or 1.0
    for rank, (local, part) in held.items():
        want = part.of(whole)
        factor = factor_of(local, want)
        if is_close(local, want, scale, tolerance):
            found[rank] = "agreed"
        elif factor is not None and is_close(local, factor * want, scale * max(1.0, abs(factor)), tolerance):
            found[rank] = f"had {factor:.4g} times the reference"
        else:
            off = float(differences(local, want).max()) / scale
            found[rank] = (
                f"had {factor:.2f} of the reference" if factor is not None and explained else f"off by {off:.2g}"
            )
    return found
