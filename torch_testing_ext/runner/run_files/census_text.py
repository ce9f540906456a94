"""The census in words: which tests were not seen running, and why, by reason and folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torch_testing_ext._process.words import count, first_names

from .census import Census, Hole, grouped_holes

# Tests of one file with the same reason and detail that have lines of their own.
_MOST_ALIKE = 3
# Rows of a table.
_MOST_ROWS = 30


def census_lines(census: Census) -> Iterator[str]:
    """The page of the census."""
    on = f" on {count(len(census.machines), 'machine')}" if census.machines else ""
    seen_in = f"not seen running in {count(census.runs, 'run')}{on}"
    if not census.runs:
        seen_in = "cannot run: so say the source and the configuration of CI"
    yield f"{len(census.holes)} of {count(census.tests, 'test')} {seen_in}"
    known = len(census.holes) - census.new_holes
    if known:
        yield f"{census.new_holes} of them new, {known} known"
    if census.holes:
        yield ""
        yield from _table("by reason", census.by_reason())
        yield ""
        yield from _table("by folder", census.by_folder())
    for reason, holes in grouped_holes(census).items():
        yield f"\n{reason}"
        # Holes of one test stand together, and those of a whole file.
        for (file, detail), alike in groupby(holes, lambda hole: (hole.file, hole.detail)):
            tests = [list(group) for _, group in groupby(alike, lambda hole: hole.line)]
            if len(tests) > _MOST_ALIKE:
                named = first_names([_names(group) for group in tests], _MOST_ALIKE)
                yield f"  {file}:{tests[0][0].line}  {named}: {detail}"
            else:
                yield from (f"  {file}:{group[0].line}  {_names(group)}: {detail}" for group in tests)
    if census.mended:
        yield "\nknown holes that are none any more"
        yield from (f"  {each.test}" for each in census.mended)
    if census.strangers:
        names = first_names(list(dict.fromkeys(census.strangers)))
        yield f"\nresults of tests that no source file has: {names}"
    if census.dead_places:
        yield "\nplaces that CI names, and that do not exist"
        yield from (f"  {place}" for place in census.dead_places)
    for warning in census.warnings:
        yield f"\nwarning: {warning}"


def _table(title: str, numbers: Counter[str]) -> Iterator[str]:
    yield title
    yield from (f"  {number:>6}  {name}" for name, number in numbers.most_common(_MOST_ROWS))
    if others := numbers.most_common()[_MOST_ROWS:]:
        yield f"  {sum(number for _, number in others):>6}  in {len(others)} others"


def _names(holes: Sequence[Hole]) -> str:
    """The test, with the parameters that are holes."""
    first = holes[0]
    inner = first.test.removeprefix(first.file).removeprefix("::")
    if len(holes) == 1:
        named = inner
    elif "[" not in inner:
        # A decorator has made their names.
        named = first_names([hole.test.rpartition("::")[2] for hole in holes])
    else:
        base = inner.partition("[")[0]
        parameters = [hole.test.partition("[")[2].removesuffix("]") for hole in holes]
        named = f"{base}[{first_names(parameters)}]"
    if first.known is None:
        return named
    if first.is_expired:
        return f"{named} (known until {first.known.until}, which is over: {first.known.why})"
    return f"{named} (known until {first.known.until}: {first.known.why})"


def census_document(census: Census) -> dict[str, Any]:
    """The census for programs."""
    return {
        "format": "torch_testing_ext census 1",
        "tests": census.tests,
        "runs": census.runs,
        "machines": census.machines,
        "new": census.new_holes,
        "by_reason": census.by_reason(),
        "by_folder": census.by_folder(),
        "holes": [_hole(hole) for hole in census.holes],
        "strangers": census.strangers,
        "warnings": census.warnings,
        "dead_places": census.dead_places,
    }


def _hole(hole: Hole) -> dict[str, Any]:
    return {
        "test": hole.test,
        "file": hole.file,
        "line": hole.line,
        "reason": hole.reason.value,
        "detail": hole.detail,
        "known_until": str(hole.known.until) if hole.known else None,
        "expired": hole.is_expired,
    }
