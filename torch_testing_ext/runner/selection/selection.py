"""Selects files and tests by name. Pure: names in, names out.

A name selects its closest matches: files and folders with exactly this path; else paths that contain it; else paths
that contain it if its last part may be the beginning of a file's or folder's name. `::` adds a class and a test.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..model import Test, TestId
from ..options.options import Options, UsageError
from ..options.suggestions import nearest
from . import expressions


class _Closeness(enum.IntEnum):
    """How a name matches a file; smaller is closer."""

    PATH = 0  # the file itself, or a folder that contains it
    PART = 1  # consecutive whole parts of its path
    BEGINNING = 2  # likewise, but only the beginning of the last part
    NONE = 3


@dataclass(frozen=True)
class _Name:
    """A name as the user wrote it."""

    text: str
    path: str
    inner: tuple[str, ...]  # the parts after ::

    @classmethod
    def read(cls, text: str, root: Path, cwd: Path) -> _Name:
        path, *inner = text.split("::")
        return cls(text, _from_root(path, root, cwd), tuple(inner))


def _from_root(path: str, root: Path, cwd: Path) -> str:
    """A path that exists in the working directory, relative to the root; any other name unchanged."""
    absolute = (cwd / path).resolve()
    if path and absolute.exists() and absolute.is_relative_to(root.resolve()):
        return absolute.relative_to(root.resolve()).as_posix()
    return path


@dataclass(frozen=True)
class Selection:
    """What the user selected, applied in two steps: to files before they are imported, to tests afterwards."""

    included: tuple[_Name, ...]
    excluded: tuple[_Name, ...]
    matches: tuple[expressions.Matches, ...]

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Selection:
        """The selection that the options describe. Raises UsageError."""

        def read(names: Iterable[str]) -> tuple[_Name, ...]:
            return tuple(_Name.read(name, root, cwd) for name in names)

        matches = tuple(expressions.parse_expression(text) for text in options.keyword)
        return cls(read((*options.names, *options.include)), read(options.exclude), matches)

    def files(self, known: Sequence[str]) -> tuple[str, ...]:
        """The files to import. Raises UsageError."""
        included = {file for name in self.included for file in _files(name, known)} if self.included else set(known)
        excluded = {file for name in self.excluded for file in _files(name, known) if not name.inner}
        return tuple(file for file in known if file in included - excluded)

    def tests(self, known: Sequence[Test], files: Sequence[str]) -> tuple[Test, ...]:
        """The tests to run. `known` are the tests of all imported files; broken and unselected files have none.

        Raises UsageError.
        """
        included = [_predicate(name, known, files) for name in self.included]
        excluded = [_predicate(name, known, files) for name in self.excluded]

        def wanted(test: TestId) -> bool:
            return (
                (not included or any(matches(test) for matches in included))
                and not any(matches(test) for matches in excluded)
                and (not self.matches or any(matches(test) for matches in self.matches))
            )

        return tuple(test for test in known if wanted(test.id))


# -- files


def _files(name: _Name, known: Sequence[str]) -> tuple[str, ...]:
    closeness = {file: _closeness(name.path, file) for file in known}
    closest = min(closeness.values(), default=_Closeness.NONE)
    if closest is _Closeness.NONE:
        raise UsageError(
            f"{name.text}: no test file has this name, or one that begins with it.{_suggestion(name.path, known)}"
        )
    return tuple(file for file in known if closeness[file] is closest)


def _closeness(path: str, file: str) -> _Closeness:
    if PurePosixPath(file).is_relative_to(path):
        return _Closeness.PATH
    wanted, parts = _parts(path), _parts(file)
    places = range(len(parts) - len(wanted) + 1) if wanted else ()
    if any(parts[place : place + len(wanted)] == wanted for place in places):
        return _Closeness.PART
    begins = any(_begins(parts[place : place + len(wanted)], wanted) for place in places)
    return _Closeness.BEGINNING if begins else _Closeness.NONE


def _parts(path: str) -> list[str]:
    """The parts of a path, or of a module's dotted name."""
    path = path.strip("/").removesuffix(".py")
    return [part for part in path.replace(".", "/").split("/") if part]


def _begins(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return parts[:-1] == wanted[:-1] and parts[-1].startswith(wanted[-1])


def _suggestion(path: str, known: Sequence[str]) -> str:
    """Suggests paths for a path, and names without folders for a name without folders."""
    return nearest(path, known if "/" in path else {_parts(file)[-1] for file in known})


# -- tests


def _predicate(name: _Name, known: Sequence[Test], files: Sequence[str]) -> Callable[[TestId], bool]:
    in_files = frozenset(_files(name, files))
    if not name.inner:
        return lambda test: test.file in in_files
    candidates = [test.id for test in known if test.id.file in in_files]
    for matches in (_exactly(name.inner), _beginning(name.inner)):
        tests = frozenset(test for test in candidates if matches(test))
        if tests:
            return tests.__contains__
    if in_files - {test.file for test in candidates}:
        return lambda test: False  # the test may be in a file whose tests are unknown
    names = ["::".join(part) for test in candidates for part in ((test.cls,), (test.method,), (test.cls, test.method))]
    raise UsageError(
        f"{name.text}: no test in these files has this name, or one that begins with it."
        f"{nearest('::'.join(name.inner), names)}"
    )


def _exactly(inner: Sequence[str]) -> Callable[[TestId], bool]:
    return lambda test: tuple(inner) in ((test.cls,), (test.cls, test.method), (test.method,))


def _beginning(inner: Sequence[str]) -> Callable[[TestId], bool]:
    if len(inner) == 1:
        return lambda test: test.cls.startswith(inner[0]) or test.method.startswith(inner[0])
    return lambda test: len(inner) == 2 and test.cls == inner[0] and test.method.startswith(inner[1])
