"""The report of a sweep: the effects of its faults on a test, as data and in words."""

from __future__ import annotations

from dataclasses import dataclass

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.faults import Wrong


@dataclass(frozen=True)
class SweepCell:
    """One run of a test with one fault."""

    fault: str  # whole: `kill(rank=1, at=call(2))`
    word: str  # without rank and point
    rank: int
    point: str
    place: str  # such as `at all_reduce #2`
    outcome: TestOutcome  # TIMEOUT if ranks that had not failed had to be ended; SKIPPED if the fault did not happen
    was_noticed: bool = False  # a call of a survivor has failed
    came_too_late: bool = False  # the call was over before the fault could happen in it
    error: str = ""  # the type of the exception, or how the rank has ended
    seconds: float | None = None  # from the fault to that end
    title: str = ""  # of the failure
    known: str = ""  # the reason for which it is known

    @property
    def is_pass(self) -> bool:
        return self.outcome is TestOutcome.PASSED

    @property
    def hangs(self) -> bool:
        return self.outcome is TestOutcome.TIMEOUT

    @property
    def end(self) -> str:
        """The effect of the fault in a word or two."""
        if self.outcome is TestOutcome.SKIPPED:
            return "not tried" if self.came_too_late else "did not happen"
        if self.is_pass:
            return "recovered" if self.was_noticed else "passed"
        return "hung" if self.hangs else "error"


@dataclass(frozen=True)
class SweepReport:
    """All runs of a test with faults, or the reason why it has none."""

    cells: tuple[SweepCell, ...] = ()
    wrong: Wrong = Wrong.NOTHING
    why_not: str = ""
    missing: tuple[str, ...] = ()  # known cells that are no more: there is no such point
    names: tuple[str, ...] = ()  # given to `fault_point` and `reached` in the code
    reached: tuple[str, ...] = ()  # of these, in any run

    @property
    def is_of_run(self) -> bool:
        """Whether the run has asked for the faults, not the test."""
        return self.wrong.is_of_run

    def is_wrong(self, cell: SweepCell) -> bool:
        """Whether a cell fails the test: it has failed and is not known to, or has not, and is known to."""
        if self.wrong is Wrong.NOTHING or cell.came_too_late:
            return False
        if self.is_of_run and cell.outcome is TestOutcome.SKIPPED:
            return False
        return self.has_failed(cell) != bool(cell.known)

    def has_failed(self, cell: SweepCell) -> bool:
        """Whether a cell has ended in the way that the sweep looks for."""
        return cell.hangs if self.is_of_run else not cell.is_pass

    def line(self, cell: SweepCell) -> str:
        """A cell in a line of a message."""
        known = f"known to {self.wrong.verb}: {cell.known}"
        if cell.came_too_late:
            how = "not tried: the call was over before"
        elif cell.known and self.has_failed(cell):
            how = known
        elif cell.known:
            how = f"{'passes' if cell.is_pass else cell.end}, though {known}"
        else:
            how = cell.end if cell.is_pass else cell.title
        return f"{cell.fault}{' ' if cell.place else ''}{cell.place}: {how}"

    def hangs(self, known: bool) -> list[str]:
        """The faults that hang a test, and why; those that are known to, with their reasons."""
        hung = [cell for cell in self.cells if cell.hangs and bool(cell.known) is known]
        return [f"{cell.fault} {cell.place}: {cell.known or cell.title}" for cell in hung]

    def fails_no_more(self) -> list[str]:
        """The faults that are known to do what is wrong, and do not."""
        others = [cell for cell in self.cells if cell.known and not self.has_failed(cell)]
        told = [f"{cell.fault}: {cell.end}; known to {self.wrong.verb}: {cell.known}" for cell in others]
        return [*told, *self.missing]

    def title(self) -> str:
        """The reason for which the test fails; "" if it passes."""
        if self.wrong is Wrong.FAILURES and not self.missing and all(cell.came_too_late for cell in self.cells):
            why = self.why_not or "each call was over before the fault could happen in it"
            return f"the sweep has tried no fault: {why}"
        wrong = [cell for cell in self.cells if self.is_wrong(cell)]
        gone = self.missing if self.wrong is not Wrong.NOTHING else ()
        lines = [*map(self.line, wrong), *gone]
        if not lines:
            return ""
        failed = sum(map(self.has_failed, wrong))
        counts = [f"{failed} of {len(self.cells)} faults {self.wrong.verb} this test"] if failed else []
        others = len(lines) - failed
        if others:
            counts.append(f"{others} known to {self.wrong.verb} it {'does' if others == 1 else 'do'} so no more")
        return f"{', and '.join(counts)}; the first: {lines[0]}"

    def text(self) -> str:
        """All cells, a line each."""
        return "\n".join(["the faults, one run each:", *(f"  {self.line(cell)}" for cell in self.cells)])
