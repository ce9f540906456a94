"""The way in which a run loads test files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch_testing_ext.runner.load_as import LoadAs

from .options import Options
from .scheduling.finding_files import named_places


def load_as_of(options: Options, root: Path) -> LoadAs:
    """The way that the options describe. Where they name nothing but files and folders, pytest looks only there."""
    if not options.by_pytest:
        return LoadAs(by_pytest=False)
    cwd = Path.cwd()
    named = _relative(named_places(options, root, cwd), root)
    names = (*options.names, *options.include)
    is_all = len(named) == len(names) and not options.exclude
    if named and is_all:
        return LoadAs(all_marks=bool(options.marks), places=tuple(dict.fromkeys(named)))
    places = _relative(options.tests, root)
    return LoadAs(all_marks=bool(options.marks), places=places, more_places=named)


def _relative(places: Iterable[Path], root: Path) -> tuple[str, ...]:
    """The places relative to the root, as far as they are below it: it may be elsewhere on another machine."""
    root = root.resolve()
    return tuple(str(place.relative_to(root) if place.is_relative_to(root) else place) for place in places)
