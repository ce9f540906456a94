"""The tensors of a run beside those of the reference: for each the part that each rank holds and should hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torch_testing_ext._process.words import nearest
from torch_testing_ext.layouts.tensor_parts import (
    Held,
    Part,
    are_alike,
    as_real,
    declared_part,
    find_part,
    whole_part,
)
from torch_testing_ext.layouts.training_looks import Key, LayoutRun, TensorLook

# How far weights after some steps may be from those of the reference, to be found by their content.
_OF_TRAINED = 1e-7


class Alignment:
    """The cuts of a run's parameters: by DTensors, by what the program says, or by their content at the start."""

    def __init__(self, reference: LayoutRun, run: LayoutRun, step: int = -1, kind: str = "start"):
        self.reference, self.run = reference, run
        self.starts = {
            name: look[0].local
            for (at, each, name), look in reference.looks.items()
            if (at, each) == (step, kind) and look[0].local is not None
        }
        # Weights that were trained differ by rounding.
        self._tolerance = 0.0 if kind == "start" else _OF_TRAINED
        # Why a tensor is not compared, by its name.
        self.not_compared: dict[str, str] = {}
        self._parts: dict[tuple[str, int], Part] = {}
        # The reference's names of tensors that a rank calls otherwise.
        self._names: dict[tuple[str, int], str] = {}
        # The names of tensors that a rank has in the place of another, by name and rank.
        self.misplaced: dict[tuple[str, int], str] = {}
        for (at, each, name), by_rank in run.looks.items():
            if (at, each) == (step, kind):
                for rank, look in by_rank.items():
                    self._place(name, rank, look)
        for (name, rank), other in list(self._names.items()):
            if name in self.starts and not self._is_numbered_anew(name, rank, other):
                self.misplaced[name, rank] = other

    def _is_numbered_anew(self, name: str, rank: int, other: str) -> bool:
        """Whether a rank counts layers or experts from 0: all of its tensors of this one are those of the other."""
        mine, wanted = name.split("."), other.split(".")
        differ = [at for at, pair in enumerate(zip(mine, wanted, strict=True)) if pair[0] != pair[1]]
        if not all(mine[at].isdecimal() and wanted[at].isdecimal() for at in differ):
            return False
        until = differ[-1] + 1
        prefix = ".".join(mine[:until])
        beside = [each for each, at in self._parts if at == rank and f"{each}.".startswith(f"{prefix}.")]
        moved = {each: ".".join([*wanted[:until], *each.split(".")[until:]]) for each in beside}
        return all(self._names.get((each, rank), each) == to for each, to in moved.items())

    def is_renamed(self, module: str) -> bool:
        """Whether some rank has a parameter of a module under another name than the reference."""
        own = [(name, other) for (name, _), other in self._names.items() if name != other]
        return bool(module) and any(name.startswith(f"{module}.") for name, _ in own)

    def _place(self, name: str, rank: int, look: TensorLook) -> None:
        local, whole = look.local, self.starts.get(name)
        if local is None:
            return
        if whole is not None:
            if look.part is not None:
                self._parts[name, rank] = look.part
                return
            if local.shape == whole.shape and are_alike(local, whole, self._tolerance):
                self._parts[name, rank] = whole_part(local)
                return
            if look.declared:
                self._parts[name, rank] = declared_part(look.declared, local, whole, self.run.places[rank])
                return
        last = name.rpartition(".")[2]
        others = [each for each in self.starts if each.rpartition(".")[2] == last and each != name]
        if whole is not None:
            # A name that the reference has is that of another only by numbers, or by mistake.
            depth = name.count(".")
            others = [each for each in others if each.count(".") == depth]
        own = [name] if whole is not None and whole.shape != local.shape else []
        for other in (*own, *others):
            part = find_part(local, self.starts[other], self._tolerance)
            if part is not None:
                if other != name:
                    self._names[name, rank] = other
                self._parts[name, rank] = part
                return
        if whole is not None and local.shape == whole.shape:
            self._parts[name, rank] = whole_part(local)
        elif whole is not None:
            shapes = f"{list(local.shape)} in rank {rank} and {list(whole.shape)} in the reference"
            self.not_compared[name] = f"it is {shapes}, and nothing says how it is cut"
        else:
            self.not_compared[name] = f"the reference has none of this name.{nearest(name, self.starts)}"

    def copies(self, name: str, rank: int) -> list[str]:
        """The names of a rank's parameters that are this one of the reference."""
        own = [each for each, at in self._parts if at == rank]
        return [each for each in own if self._names.get((each, rank), each) == name]

    def held(self, key: Key) -> dict[str, Held]:
        """The parts of a tensor that ranks hold, by its name in the reference: experts share one name."""
        found: dict[str, Held] = {}
        step, kind, title = key
        for rank, look in self.run.looks[key].items():
            other = self._names.get((look.follows, rank))
            known = title.replace(look.follows, other) if other else title
            whole = self._whole((step, kind, known))
            part = look.part or self._parts.get((look.follows, rank))
            local = look.local
            if whole is None:
                if local is not None:
                    self.not_compared.setdefault(title, "the reference has not recorded it")
                continue
            if local is None:
                if part is None:
                    continue
                local = torch.zeros_like(part.of(whole))
            if part is None or not _fits(part, whole, local):
                if local.shape != whole.shape:
                    shapes = f"{list(local.shape)} in rank {rank} and {list(whole.shape)} in the reference"
                    self.not_compared[title] = f"it is {shapes}"
                    continue
                part = whole_part(local)
            for members in part.partial:
                parts = [self.run.looks[key][member].local for member in members]
                local = torch.stack([each for each in parts if each is not None]).sum(0)
            local = part.without_padding(local)
            if local.is_complex():
                local, part = as_real(local), Part((*part.index, None))
            found.setdefault(known, {})[rank] = local, part
        return found

    def of_kind(self, step: int, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Held]]:
        """All tensors of a kind in a step, by their names: those of the reference, and what ranks hold of them."""
        held: dict[str, Held] = {}
        for key in [key for key in self.run.looks if key[:2] == (step, kind)]:
            for name, of_key in self.held(key).items():
                held.setdefault(name, {}).update(of_key)
        return {name: whole for name in held if (whole := self.whole((step, kind, name))) is not None}, held

    def whole(self, key: Key) -> torch.Tensor | None:
        """A tensor of the reference as real numbers, in which a gradient that is not there is zero."""
        whole = self._whole(key)
        return None if whole is None else as_real(whole)

    def _whole(self, key: Key) -> torch.Tensor | None:
        step, kind, name = key
        look = self.reference.looks.get(key, {}).get(0)
        if look is None and kind == "clipped":
            # Nothing has clipped there, or looked twice.
            look = self.reference.looks.get((step, "grad", name), {}).get(0)
        if look is None or look.local is not None:
            return None if look is None else look.local
        start = self.starts.get(name)
        return None if start is None else torch.zeros_like(start)

    def uncovered(self) -> Iterator[tuple[str, str]]:
        """Weights of the reference of which no rank holds some part, each with the sentence that says so."""
        masks = {name: torch.zeros(whole.shape, dtype=torch.bool) for name, whole in self.starts.items()}
        for (name, rank), part in self._parts.items():
            mask = masks.get(self._names.get((name, rank), name))
            if mask is not None:
                shape = [size if rows is None else len(rows) for rows, size in zip(part.index, mask.shape, strict=True)]
                part.put(torch.ones(shape, dtype=torch.bool), mask)
        for name, mask in masks.items():
            if name not in self.not_compared and not bool(mask.all()):
                missing = (~mask).nonzero()
                some = f"has its elements {missing[0].tolist()} to {missing[-1].tolist()}"
                yield name, f"no rank {'has it' if not bool(mask.any()) else some}"


def _fits(part: Part, whole: torch.Tensor, local: torch.Tensor) -> bool:
    if len(part.index) != whole.dim():
        return False
    shape = [size if rows is None else len(rows) for rows, size in zip(part.index, whole.shape, strict=True)]
    largest = [int(rows.max()) if rows is not None and len(rows) else -1 for rows in part.index]
    inside = all(last < size for last, size in zip(largest, whole.shape, strict=True))
    return shape == list(local.shape) and inside
