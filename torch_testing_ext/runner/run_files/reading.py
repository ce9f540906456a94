"""Reads files of results, whatever has written them."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from .junit_results import read_junit
from .results import RunResults, results_of_run
from .run_file import RunFile, is_run_file, read_run_file


def paths_of(words: Sequence[str]) -> list[Path]:
    """The files that words name. A pattern that no shell has expanded is expanded; one without files stays."""
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            found += sorted([*path.rglob("*.ttx"), *path.rglob("*.xml")])
        elif not path.exists() and (names := sorted(glob.glob(word, recursive=True))):
            found += map(Path, names)
        else:
            found.append(path)
    return found


def read_results(path: Path) -> tuple[RunResults, ...]:
    """The results of a run file, or of a JUnit file of any runner. Raises BadResults."""
    if is_run_file(path):
        return tuple(results_of_file(read_run_file(path)))
    return (read_junit(path),)


def results_of_file(file: RunFile) -> Iterator[RunResults]:
    """The results of each run in a run file."""
    for facts, recorded in file.recorded():
        yield results_of_run(str(file.path), facts, recorded, file.missing)
