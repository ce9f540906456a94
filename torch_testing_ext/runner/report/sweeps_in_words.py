"""The effects of the faults of sweeps, as tables and lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from torch_testing_ext._process.words import grouped, list_of
from torch_testing_ext._tests.sweep_reports import SweepCell, SweepReport
from torch_testing_ext.runner.model import FinishedTest, Summary

from .console_style import Style
from .wording import duration, printable


class Matrix(NamedTuple):
    """One fault by point and rank: neighbouring points are in one row, and ranks in one column, if alike."""

    head: list[str]
    rows: list[tuple[str, list[tuple[SweepCell, ...]]]]


def sweeps(summary: Summary) -> list[tuple[FinishedTest, SweepReport]]:
    """The tests of a run that have had faults, or were left out."""
    return [(result, result.last.end.sweep) for result in summary.finished if result.last.end.sweep is not None]


def not_reached(summary: Summary) -> list[str]:
    """The names in the code of tests with faults that no run of any test has reached."""
    reports = [report for _, report in sweeps(summary)]
    reached = {name for report in reports for name in report.reached}
    return sorted({name for report in reports for name in report.names} - reached)


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


# The most faults that a list on the console names.
_MOST_TOLD = 10


def sweep_lines(report: SweepReport) -> list[tuple[Style | None, str]]:
    """The matrices of a test in a sweep of the run as a table, and what hangs it; each line with its style."""
    lines: list[tuple[Style | None, str]] = []
    for matrix in matrices(report) if report.is_of_run else ():
        rows = [matrix.head, *([title, *map(cell_words, cells)] for title, cells in matrix.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append((None, f"  {'  '.join(padded)}".rstrip()))
    for heading, told, style in told_of_run(report):
        named = [*told[:_MOST_TOLD], *([f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else [])]
        lines += [(style, f"  {heading}: {line}") for line in named]
    return lines


def told_of_run(report: SweepReport) -> list[tuple[str, list[str], Style]]:
    """The lines of a sweep of the run besides its matrices: hangs, known ones, and known ones that are no more."""
    if not report.is_of_run:
        return []
    return [
        ("hangs", [printable(line) for line in report.hangs(known=False)], Style.RED),
        ("known to hang", report.hangs(known=True), Style.FAINT),
        ("hangs no more", report.fails_no_more(), Style.YELLOW),
    ]
