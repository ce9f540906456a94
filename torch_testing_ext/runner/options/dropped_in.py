"""The options of a run of dropped-in tests: those of checkouts, folders and files that are not the project's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_testing_ext._process.project_folder import is_checkout, tests_of_checkout
from torch_testing_ext._process.project_settings import RUNNER_PREFIX

from .all_options import Options
from .layers import COMMAND_LINE, DEFAULT
from .values import UsageError


def with_dropped_in(options: Options, sources: Mapping[str, str], cwd: Path) -> Options:
    """The options for the tests of checkouts, folders and files, which are not the project's own.

    Names select among these. They have a cache of their own, since the project may have tests with the same names.
    """
    places = _existing(options.drop_in)
    files = _further_files(places, options.names, cwd)
    places = (*places, *files)
    tests = options.tests
    # A configuration file has the project's folders.
    are_for_this_run = sources["tests"] == COMMAND_LINE or sources["tests"].startswith(RUNNER_PREFIX)
    if not are_for_this_run:
        tests = tuple(tests_of_checkout(place) if is_checkout(place) else place for place in places)
    cache = options.cache
    if sources["cache"] == DEFAULT:
        cache = cache / "drop_in"
    names = () if files else options.names
    return dataclasses.replace(options, drop_in=places, names=names, tests=tests, cache=cache)


def _existing(places: Sequence[Path]) -> tuple[Path, ...]:
    """The places, without symbolic links. Raises UsageError for one that is missing or is named twice."""
    paths: list[Path] = []
    for place in places:
        path = place.resolve()
        if not path.exists():
            raise UsageError(f"--drop-in {place}: there is no such file or folder")
        if path.is_file() and path.suffix != ".py":
            raise UsageError(f"--drop-in {place}: this file is not a Python file")
        if path in paths:
            raise UsageError(f"--drop-in {place}: named twice")
        paths.append(path)
    return tuple(paths)


def _further_files(places: Sequence[Path], names: Sequence[str], cwd: Path) -> tuple[Path, ...]:
    """With `--drop-in FILE FILE ...`, the files after the first, which look like names. Raises UsageError."""
    named = [cwd / name for name in names]
    paths = [path.resolve() for path in named]
    for path in (*places, *paths):
        if not path.is_file() or path.suffix != ".py":
            return ()
    if set(paths) <= set(places):
        return ()
    all_files = _existing((*places, *named))
    return all_files[len(places) :]
