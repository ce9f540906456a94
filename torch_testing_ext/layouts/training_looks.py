"""The data of a compared training: how it is run, what its ranks have looked at, and what all of them had together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_testing_ext._process.code_sites import Site
from torch_testing_ext.layouts.layout_text import groups_along
from torch_testing_ext.layouts.tensor_parts import Part

DATA_AXES = ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "ddp", "fsdp", "hsdp", "ep")
SEQUENCE_AXES = ("cp",)
# The order in which a step makes what is looked at. The first that is wrong comes before those that follow from it.
ORDER = ("start", "data", "dropout", "loss", "value", "grad", "norm", "clipped", "param", "state", "buffer")
# What only the diagnosis records: outputs of modules, their gradients, and gradients of single samples.
OUTPUT, OUTPUT_GRADIENT, SAMPLE = "output", "output gradient", "sample"
# The numbers of labels of a global batch: of those that count, and of all.
LABELS = "labels"
WHOLE, SAVE, LOAD = "whole", "save", "load"

# A step, a kind of ORDER, and a name.
Key = tuple[int, str, str]


@dataclass
class TensorLook:
    """A tensor of a rank at a point of a step; None for a gradient that is not there."""

    local: torch.Tensor | None
    # None for a plain tensor, which is aligned later.
    part: Part | None = None
    # Pairs of a dimension and the axis that cuts it, if the program says so.
    declared: list[tuple[int, str]] | None = None
    # The parameter that it is cut like.
    follows: str = ""


@dataclass(frozen=True)
class ProbedCall:
    """A collective that a rank has issued, and its line in the program."""

    text: str
    site: Site | None


@dataclass(frozen=True)
class Setup:
    """One run of a training: its phase, its weights, and what else is looked at."""

    folder: str
    dtype: torch.dtype
    seed: int
    all_axes: tuple[str, ...]
    data: tuple[str, ...]
    sequence: tuple[str, ...]
    generic: bool = True
    devices: int = 0
    timeout: float | None = None
    # Moves weights that are generic, and keeps them for others.
    makes_weights: bool = False
    phase: str = WHOLE
    # The text of a layout with an arrow.
    arrow: str = ""
    first_step: int = 0
    end_step: int | None = None
    # Not 0 in control runs: each weight is moved by `unit`, up or down, by this seed.
    nudge: int = 0
    unit: float = 0.0
    # In a diagnosis run: the step whose modules are looked at.
    probe: int | None = None
    # In a diagnosis run: parts of each sample of the first batch, which are trained on alone.
    chunks: int = 0

    @property
    def is_float64(self) -> bool:
        return self.dtype == torch.float64


@dataclass
class RankLooks:
    """All that one rank of a run has looked at."""

    looks: dict[Key, TensorLook] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    # Calls of the model in a training forward of the first step.
    microbatches: int = 1
    # Of a probed step: names of modules, by the kind of what was seen, and calls.
    order: list[tuple[str, str] | ProbedCall] = field(default_factory=list)
    # A digest of all that the rank has handed over to each group, by the members.
    given: dict[tuple[int, ...], int] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0


@dataclass
class LayoutRun:
    """The looks of all ranks of a layout."""

    text: str
    axes: dict[str, int]
    ranks: dict[int, RankLooks]
    looks: dict[Key, dict[int, TensorLook]]

    @classmethod
    def of_ranks(cls, text: str, axes: dict[str, int], ranks: dict[int, RankLooks]) -> LayoutRun:
        looks: dict[Key, dict[int, TensorLook]] = {}
        for rank, record in ranks.items():
            for key, look in record.looks.items():
                looks.setdefault(key, {})[rank] = look
        return cls(text, axes, ranks, looks)

    @property
    def places(self) -> dict[int, dict[str, int]]:
        return {rank: record.places for rank, record in self.ranks.items()}

    @property
    def microbatches(self) -> int:
        return max(record.microbatches for record in self.ranks.values())

    @property
    def steps(self) -> int:
        return max(record.steps for record in self.ranks.values())

    @property
    def seconds(self) -> float:
        """The CPU time of all ranks."""
        return sum(record.seconds for record in self.ranks.values())

    def groups(self, over: Sequence[str], ranks: Sequence[int] | None = None) -> list[list[int]]:
        """Ranks that differ only in their places on these axes."""
        chosen = self.ranks if ranks is None else ranks
        return groups_along(over, {rank: self.ranks[rank].places for rank in chosen})

    def of_reference(self, key: Key) -> torch.Tensor | None:
        """A tensor of the only rank, if it has it."""
        look = self.looks.get(key, {}).get(0)
        return None if look is None else look.local
