"""The result of a comparison: the first tensor of a layout that is wrong, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch_testing_ext._process.code_sites import Site
from torch_testing_ext.layouts.hypotheses import Reason


@dataclass
class LayoutFinding:
    """A kind of tensors that is wrong in a step, by its most telling one."""

    step: int
    # One of ORDER.
    kind: str
    name: str
    reasons: list[Reason] = field(default_factory=list)
    # All of the kind that are wrong, and the number that were compared.
    wrong: list[str] = field(default_factory=list)
    compared: int = 1
    # Of the difference, relative.
    size: float = 0.0
    # What each rank has.
    shares: dict[int, str] = field(default_factory=dict)
    sites: dict[int, Site] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_after_loading: bool = False

    @property
    def is_explained(self) -> bool:
        """Whether a reason says more than that it differs."""
        return any(not reason.is_vague for reason in self.reasons)

    @property
    def title(self) -> str:
        """The tensor in words, with its step."""
        if self.is_after_loading:
            return f"{self.name} after loading"
        words = {
            "start": f"{self.name} before the first step",
            "data": "the samples",
            "dropout": f"dropout, {self.name}",
            "grad": f"the gradient of {self.name}",
            "clipped": f"the clipped gradient of {self.name}",
            "norm": "the norm of the gradients",
            "param": f"{self.name} after the step",
        }
        what = words.get(self.kind, self.name)
        return what if self.step < 0 else f"{what}, step {self.step}"


@dataclass
class LayoutReport:
    """The comparison of one layout with the reference. `refusal`: why it says nothing, if it does not."""

    layout: str
    finding: LayoutFinding | None = None
    refusal: str = ""
    # Wrong tensors of other kinds in the same step.
    others: list[LayoutFinding] = field(default_factory=list)
    # The number of tensors, and those that could not be compared, with the reason.
    compared: int = 0
    not_compared: dict[str, str] = field(default_factory=dict)
    # In low precision: the largest ratio of a difference to what one rounding error makes.
    worst: float = 0.0
    remark: str = ""
    # The CPU time of the ranks.
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.finding is None and not self.refusal

    @property
    def summary(self) -> str:
        """One line."""
        if self.refusal:
            return self.refusal
        if self.finding is not None:
            return f"{self.layout} does not train as the reference: {self.finding.title}"
        remark = f"; {self.remark}" if self.remark else ""
        tensors = f"{self.compared} tensors alike, {len(self.not_compared)} not compared"
        return f"{self.layout} trains alike: {tensors}{remark}"

    def data(self) -> dict[str, Any]:
        """The report as values of JSON."""
        found: dict[str, Any] = {"layout": self.layout, "compared": self.compared, "not_compared": self.not_compared}
        if self.refusal:
            found["refusal"] = self.refusal
        if self.finding is not None:
            finding = self.finding
            found |= {"step": finding.step, "kind": finding.kind, "tensor": finding.name, "wrong": finding.wrong}
            found["reasons"] = [{"kind": r.kind, "axis": r.axis, "text": r.text} for r in finding.reasons]
        return found
