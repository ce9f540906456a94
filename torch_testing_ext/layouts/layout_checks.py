"""A training under several layouts: the reference and its controls, each layout beside it, and the diagnosis."""

from __future__ import annotations

import functools
import inspect
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from torch_testing_ext import launch
from torch_testing_ext._testing.bases.invocation import case_of
from torch_testing_ext._testing.bases.rank_accounts import function_within, refuse_to_run_nothing
from torch_testing_ext._testing.bases.rank_verdicts import RankError, RankFailure
from torch_testing_ext._tests.source_files import source_file
from torch_testing_ext.layouts import diagnosis
from torch_testing_ext.layouts.alignment import Alignment
from torch_testing_ext.layouts.comparison import Comparison
from torch_testing_ext.layouts.layout_failures import error_of, with_layout
from torch_testing_ext.layouts.layout_findings import LayoutFinding, LayoutReport
from torch_testing_ext.layouts.layout_options import LayoutOptions, checked_options
from torch_testing_ext.layouts.layout_runs import Train, run_layout
from torch_testing_ext.layouts.layout_text import axes_of_all, parse_steps
from torch_testing_ext.layouts.reference_controls import why_it_does_not_train, why_nothing_continues
from torch_testing_ext.layouts.training_looks import LOAD, SAMPLE, SAVE, WHOLE, LayoutRun, Setup

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
__tracebackhide__ = True

_CONTROLS = 3
# Differences below may come from parts that compute in float32.
_OF_FLOAT32 = 1e-4
# The kinds of tensors that modules and samples explain.
_FROM_FORWARD = ("loss", "value", "grad")


class LayoutCheck:
    """The layouts of one training. Its reference is run at the first need, and serves all of them."""

    def __init__(self, texts: Sequence[str], options: LayoutOptions):
        self.options = options
        self._texts = tuple(texts)
        self._references: dict[torch.dtype, _Reference] = {}

    def report(self, train: Train, text: str, case: launch.Case) -> LayoutReport:
        """Compare one layout in each type; the first that is wrong counts. Raises what ranks raise."""
        __tracebackhide__ = True
        reports = []
        for dtype in self.options.dtypes:
            if dtype not in self._references:
                self._references[dtype] = _Reference(self._texts, self.options, dtype)
            report = self._references[dtype].report(train, text, case)
            if len(self.options.dtypes) > 1:
                report.remark = "; ".join(filter(None, [report.remark, str(dtype).removeprefix("torch.")]))
            if not report.is_right:
                return report
            reports.append(report)
        return reports[0]

    def close(self) -> None:
        """Remove what its runs have left."""
        for reference in self._references.values():
            reference.close()
        self._references.clear()


class _Reference:
    """The reference in one type, with its controls, and layouts beside it."""

    def __init__(self, texts: Sequence[str], options: LayoutOptions, dtype: torch.dtype):
        self._folder = tempfile.TemporaryDirectory(prefix="layouts-")
        self._options = options
        self._setup = Setup(
            self._folder.name,
            dtype,
            options.seed,
            tuple(axes_of_all(texts)),
            options.data,
            options.sequence,
            options.generic,
            options.devices,
            options.timeout,
            unit=torch.finfo(dtype).eps,
        )
        self._run: LayoutRun | None = None
        # Why the reference is none.
        self._refusal = ""
        self._controls: list[LayoutRun] = []
        # Runs with a rounding error of float32 in each weight, for parts that compute in it.
        self._float32: list[LayoutRun] = []
        # Gradients of samples alone, by the parts of a sample.
        self._alone: dict[int, LayoutRun] = {}

    def close(self) -> None:
        self._folder.cleanup()

    def report(self, train: Train, text: str, case: launch.Case) -> LayoutReport:
        __tracebackhide__ = True
        if self._run is None:
            self._make(train, case)
        if self._refusal:
            return LayoutReport(text, refusal=self._refusal)
        first, *second = parse_steps(text)
        if not second:
            report = self._judged(train, first, self._setup, case)
        else:
            saves = replace(self._setup, phase=SAVE, arrow=text, end_step=self._options.save_after)
            report = self._judged(train, first, saves, case)
            if report.is_right:
                loads = replace(self._setup, phase=LOAD, arrow=text, first_step=self._options.save_after)
                before, report = report, self._judged(train, second[0], loads, case)
                report.compared += before.compared
                report.seconds += before.seconds
        report.layout = text
        if self._options.strict and report.is_right and report.not_compared:
            name, why = next(iter(report.not_compared.items()))
            report.refusal = f"{text}: {name} is not compared: {why}"
        return report

    def _make(self, train: Train, case: launch.Case) -> None:
        reference = self._options.reference
        run = self._ran(train, reference, replace(self._setup, makes_weights=True), case)
        self._run, self._refusal = run, why_it_does_not_train(run)
        if self._refusal:
            return
        again = self._ran(train, reference, replace(self._setup, seed=self._setup.seed + 1), case)
        finding = Comparison(run, again, self._setup).judge().finding
        if finding is not None:
            why = "the reference draws random numbers, or reads something else that changes"
            self._refusal = f"{why}: {finding.title}"
            return
        if not self._setup.is_float64:
            self._controls = self._nudged(train, self._setup.unit, case)

    def _nudged(self, train: Train, unit: float, case: launch.Case) -> list[LayoutRun]:
        setups = [replace(self._setup, nudge=number + 1, unit=unit) for number in range(_CONTROLS)]
        return [self._ran(train, self._options.reference, setup, case) for setup in setups]

    def _ran(self, train: Train, text: str, setup: Setup, case: launch.Case) -> LayoutRun:
        __tracebackhide__ = True
        try:
            return run_layout(train, text, setup, case)
        except (RankError, RankFailure) as error:
            raise with_layout(error, text).with_traceback(None) from None

    def _judged(self, train: Train, text: str, setup: Setup, case: launch.Case) -> LayoutReport:
        __tracebackhide__ = True
        assert self._run is not None
        run = self._ran(train, text, setup, case)
        if why := why_nothing_continues(run, setup):
            return LayoutReport(text, refusal=why)
        report = Comparison(self._run, run, setup, self._controls).judge()
        finding = report.finding
        if finding is None or self._controls or finding.kind in ("data", "dropout"):
            return report
        if 0 < finding.size < _OF_FLOAT32:
            unit = torch.finfo(torch.float32).eps
            self._float32 = self._float32 or self._nudged(train, unit, case)
            again = Comparison(self._run, run, replace(setup, unit=unit), self._float32).judge()
            if again.finding is None:
                again.remark = "computes in float32 in places: compared by measured rounding"
                return again
        self._diagnose(train, report, finding, run, setup, case)
        return report

    def _diagnose(
        self,
        train: Train,
        report: LayoutReport,
        finding: LayoutFinding,
        run: LayoutRun,
        setup: Setup,
        case: launch.Case,
    ) -> None:
        """Run again to say which samples count too much, and which module is the first that is wrong."""
        assert self._run is not None
        kinds = {each.kind for each in (finding, *report.others)}
        if finding.step == 0 and kinds & {"grad", "clipped"} and not finding.is_explained:
            self._weigh_samples(train, finding, run, setup, case)
        is_told = any(reason.kind not in ("unlike", "scaled", "factors") for reason in finding.reasons)
        data = {*setup.data, *setup.sequence}
        is_unreduced = finding.kind == "grad" and any(
            reason.kind == "missing_sum" and not data & {*reason.axis.split()} for reason in finding.reasons
        )
        if finding.kind in _FROM_FORWARD and (not is_told or is_unreduced) and setup.phase == WHOLE:
            probed = replace(self._setup, probe=finding.step)
            reference = self._ran(train, self._options.reference, probed, case)
            probed_run = self._ran(train, run.text, probed, case)
            aligned = Alignment(self._run, run)
            search = diagnosis.ModuleSearch(reference, probed_run, setup, finding.step, aligned)
            if is_told:
                search.add_place_of_reduction(finding)
            else:
                search.add_to(finding, kinds)

    def _weigh_samples(
        self, train: Train, finding: LayoutFinding, run: LayoutRun, setup: Setup, case: launch.Case
    ) -> None:
        assert self._run is not None
        if any(reason.kind == "unlike" for reason in finding.reasons):
            return
        chunks = math.prod(size for axis, size in run.axes.items() if axis in setup.sequence)
        if chunks not in self._alone:
            alone = replace(self._setup, chunks=chunks)
            self._alone[chunks] = self._ran(train, self._options.reference, alone, case)
        if any(kind == SAMPLE for _, kind, _ in self._alone[chunks].looks):
            aligned = Alignment(self._run, run)
            for only in ("", finding.name):
                # A stage alone may have lost some.
                reasons = diagnosis.weights_of_samples(self._run, self._alone[chunks], aligned, chunks, only)
                if reasons:
                    finding.reasons = reasons
                    break


def check_layouts(train: Train, *layouts: str, **options: Any) -> list[LayoutReport]:
    """Train under each layout as in one rank, and return a report of each.

        def train(layout): ...

        check_layouts(train, "tp=2", "dp=2", "tp=2 -> dp=2")

    "tp=2 -> dp=2" saves under the first layout and continues under the second. Raises LayoutError, whose `reports` are
    data, unless all train alike. The options are those of `LayoutOptions`.
    """
    __tracebackhide__ = True
    checked = checked_options(layouts, options)
    refuse_to_run_nothing(train)
    if not callable(train):
        raise TypeError(f"check_layouts needs a function of a layout, and not {train!r}")
    inner = function_within(train)
    name = f"check_layouts({getattr(inner, '__qualname__', type(inner).__qualname__)})"
    return _check(train, layouts, checked, case_of(name, source_file(inner)))


def _check(train: Train, texts: Sequence[str], options: LayoutOptions, case: launch.Case) -> list[LayoutReport]:
    __tracebackhide__ = True
    check = LayoutCheck(texts, options)
    try:
        reports = [check.report(train, text, case) for text in texts]
    finally:
        check.close()
    raise_unless_right(reports, case, options.reference)
    return reports


def raise_unless_right(reports: Sequence[LayoutReport], case: launch.Case, reference: str) -> None:
    """Raise LayoutError if one of the reports is wrong."""
    __tracebackhide__ = True
    if not all(report.is_right for report in reports):
        raise error_of(reports, case, reference)


Function = TypeVar("Function", bound=Callable[..., Any])


def layouts(*texts: str, **options: Any) -> Callable[[Function], Any]:
    """Decorator: train in a test under each layout as in one rank.

    The test is called in ranks, with the further argument `layout`. It is one test for all layouts.
    """
    if texts and callable(texts[0]):
        raise TypeError("@layouts needs layouts: @layouts('tp=2')")
    checked = checked_options(texts, options)

    def decorate(function: Function) -> Any:
        refuse_to_run_nothing(function)
        signature = inspect.signature(function)
        if "layout" not in signature.parameters:
            raise TypeError(f"{function.__qualname__}{signature} has no argument layout, which @layouts passes")

        @functools.wraps(function)
        def test(*args: Any, **named: Any) -> None:
            __tracebackhide__ = True
            case = case_of(function.__qualname__, source_file(function))
            _check(lambda layout: function(*args, layout=layout, **named), texts, checked, case)

        own = [parameter for name, parameter in signature.parameters.items() if name != "layout"]
        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return test

    return decorate
