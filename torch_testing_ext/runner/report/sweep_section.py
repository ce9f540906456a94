"""Sweeps in reports: the effects of their faults, as tables and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_testing_ext._process.words import grouped, list_of
from torch_testing_ext._tests.sweep_reports import SweepCell, SweepReport
from torch_testing_ext.runner.model import FinishedTest, Summary

from .console_layout import table
from .console_style import Style, Styler
from .section import Section
from .wording import duration, printable

if TYPE_CHECKING:
    from .xml_elements import Element, Elements

# The most faults that a list on the console names.
_MOST_TOLD = 10


class SweepSection(Section[SweepReport]):
    """The faults of each test of a run that has had some, or was left out."""

    kind = SweepReport

    def in_summary(self, summary: Summary, name: Callable[[FinishedTest], str], styler: Styler) -> Iterator[list[str]]:
        """The matrix of each test, and what hangs it; the tests without faults; the names that were not reached."""
        told = self.of(summary)
        for finished, report in told:
            if lines := _lines(report, styler):
                yield [f"faults of {name(finished)}:", *lines]
        why = grouped((report.why_not, name(finished)) for finished, report in told)
        rows = [(str(len(names)), "\n".join([reason, *names])) for reason, names in why.items() if reason]
        yield table("without faults:", rows)
        if names := self._not_reached(summary):
            yield [f"no run has reached: {', '.join(map(printable, names))}"]

    def in_json_of_run(self, summary: Summary) -> dict[str, Any]:
        """None without any sweep."""
        tests = [_as_json(finished, report) for finished, report in self.of(summary)]
        return {"sweeps": {"tests": tests, "not_reached": self._not_reached(summary)} if tests else None}

    def in_page_of_test(self, result: SweepReport) -> Elements:
        """The tables of what each fault did, by point and rank."""
        from .page.timeline import css_class
        from .xml_elements import xml_element

        if result.why_not:
            yield xml_element("p", f"Without faults: {result.why_not}", class_="facts")
        for matrix in matrices(result):
            head = xml_element("tr", *(xml_element("th", word) for word in matrix.head))
            rows = []
            for title, columns in matrix.rows:
                cells = []
                for of_cell in columns:
                    ends = css_class(of_cell[0].end) if of_cell else ""
                    titles = "\n".join(dict.fromkeys(f"{cell.fault} {cell.place} {cell.title}" for cell in of_cell))
                    cells.append(xml_element("td", cell_words(of_cell), class_=ends, title=printable(titles)))
                rows.append(xml_element("tr", xml_element("th", title), *cells))
            yield xml_element("table", head, *rows, class_="sweep")
        told = [f"{heading}: {line}" for heading, lines, _ in _told_of_run(result) for line in lines]
        if told:
            yield xml_element("ul", *(xml_element("li", line) for line in told))

    def lists_of_page(self, summary: Summary) -> Iterator[tuple[str, list[Element]]]:
        from .xml_elements import xml_element

        if names := self._not_reached(summary):
            items = [xml_element("li", xml_element("span", printable(name))) for name in names]
            yield "Names that no run has reached", items

    def _not_reached(self, summary: Summary) -> list[str]:
        """The names in the code of tests with faults that no run of any test has reached."""
        reports = [report for _, report in self.of(summary)]
        reached = {name for report in reports for name in report.reached}
        return sorted({name for report in reports for name in report.names} - reached)


def _as_json(finished: FinishedTest, report: SweepReport) -> dict[str, Any]:
    return {
        "id": str(finished.test.id),
        "asked_by": "run" if report.is_of_run else "test",
        "why_not": report.why_not or None,
        "cells": [{**asdict(cell), "outcome": cell.outcome.value, "end": cell.end} for cell in report.cells],
        "fails_no_more": report.fails_no_more(),
    }


class Matrix(NamedTuple):
    """One fault by point and rank: neighbouring points are in one row, and ranks in one column, if alike."""

    head: list[str]
    rows: list[tuple[str, list[tuple[SweepCell, ...]]]]


def matrices(report: SweepReport) -> list[Matrix]:
    """A matrix for each fault."""
    of_fault = grouped((cell.word, cell) for cell in report.cells)
    return [_matrix(word, cells) for word, cells in of_fault.items()]


def _matrix(word: str, cells: Sequence[SweepCell]) -> Matrix:
    by_place = {(cell.rank, cell.point): cell for cell in cells}
    points = list(dict.fromkeys(cell.point for cell in sorted(cells, key=lambda cell: cell.rank)))
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({cell.rank for cell in cells}):
        of_rank = [by_place.get((rank, point)) for point in points]
        alike = tuple("" if cell is None else cell_words((cell,), with_seconds=False) for cell in of_rank)
        columns.setdefault(alike, []).append(rank)
    rows = []

    def key(number: int) -> list[str]:
        return [points[number].partition("(")[0], *(alike[number] for alike in columns)]

    for _, same in groupby(range(len(points)), key):
        of_row = [points[number] for number in same]
        places = [[by_place.get((rank, point)) for rank in ranks for point in of_row] for ranks in columns.values()]
        title = of_row[0] if len(of_row) == 1 else f"{of_row[0]} to {of_row[-1]}"
        rows.append((title, [tuple(cell for cell in of_column if cell is not None) for of_column in places]))
    return Matrix([word, *map(list_of, columns.values())], rows)


def cell_words(cells: Sequence[SweepCell], with_seconds: bool = True) -> str:
    """One cell of faults that did the same; the longest time of them."""
    if not cells:
        return "-"
    first = cells[0]
    known = "" if not first.known else ", known" if first.hangs else ", known to hang"
    words = first.error if first.end == "error" else first.end
    times = [cell.seconds for cell in cells if cell.seconds is not None]
    return f"{words}{f' {duration(max(times))}' if times and with_seconds else ''}{known}"


def _lines(report: SweepReport, styler: Styler) -> list[str]:
    """The matrices of a test in a sweep of the run as tables, and what hangs it."""
    lines: list[str] = []
    for matrix in matrices(report) if report.is_of_run else ():
        rows = [matrix.head, *([title, *map(cell_words, cells)] for title, cells in matrix.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append(f"  {'  '.join(padded)}".rstrip())
    for heading, told, style in _told_of_run(report):
        named = [*told[:_MOST_TOLD], *([f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else [])]
        lines += [styler(style, f"  {heading}: {line}") for line in named]
    return lines


def _told_of_run(report: SweepReport) -> list[tuple[str, list[str], Style]]:
    """The lines of a sweep of the run besides its matrices: hangs, known ones, and known ones that are no more."""
    if not report.is_of_run:
        return []
    return [
        ("hangs", [printable(line) for line in report.hangs(known=False)], Style.RED),
        ("known to hang", report.hangs(known=True), Style.FAINT),
        ("hangs no more", report.fails_no_more(), Style.YELLOW),
    ]
