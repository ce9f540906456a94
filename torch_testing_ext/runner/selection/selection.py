"""Which files and tests a user means. Pure: names in, names out.

A name means what it is nearest to: a file or folder by its path; else by the end of its path, or a part of it; else by
how its last part begins. All that are equally near are meant. `::` goes on to a class and a test.
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


class _Near(enum.IntEnum):
    """How a file is meant by a name; the least is the nearest."""

    PATH = 0  # it, or a folder it is in
    PART = 1  # whole parts of its path, in a row
    BEGINNING = 2  # likewise, but the last part only begins so
    NOT = 3


@dataclass(frozen=True)
class _Name:
    text: str
    path: str
    inner: tuple[str, ...]  # what follows ::

    @classmethod
    def read(cls, text: str, root: Path, here: Path) -> _Name:
        path, *inner = text.split("::")
        return cls(text, _from_root(path, root, here), tuple(inner))


def _from_root(path: str, root: Path, here: Path) -> str:
    """A path that exists where the user stands, as it is seen from the root; any other name as it is."""
    absolute = (here / path).resolve()
    if path and absolute.exists() and absolute.is_relative_to(root.resolve()):
        return absolute.relative_to(root.resolve()).as_posix()
    return path


@dataclass(frozen=True)
class Selection:
    """What was asked for, in two steps: files before they are imported, tests after."""

    included: tuple[_Name, ...]
    excluded: tuple[_Name, ...]
    matches: tuple[expressions.Matches, ...]

    @classmethod
    def of(cls, options: Options, root: Path, here: Path) -> Selection:
        def read(names: Iterable[str]) -> tuple[_Name, ...]:
            return tuple(_Name.read(name, root, here) for name in names)

        matches = tuple(expressions.parse_expression(text) for text in options.keyword)
        return cls(read((*options.names, *options.include)), read(options.exclude), matches)

    def files(self, known: Sequence[str]) -> tuple[str, ...]:
        """Those to import. Raises UsageError."""
        included = {file for name in self.included for file in _files(name, known)} if self.included else set(known)
        excluded = {file for name in self.excluded for file in _files(name, known) if not name.inner}
        return tuple(file for file in known if file in included - excluded)

    def tests(self, known: Sequence[Test], files: Sequence[str]) -> tuple[Test, ...]:
        """Those to run of the tests known, which are those of all files but the broken and the unwanted.

        Raises UsageError.
        """
        included = [_means(name, known, files) for name in self.included]
        excluded = [_means(name, known, files) for name in self.excluded]

        def wanted(test: TestId) -> bool:
            return (
                (not included or any(means(test) for means in included))
                and not any(means(test) for means in excluded)
                and (not self.matches or any(matches(test) for matches in self.matches))
            )

        return tuple(test for test in known if wanted(test.id))


# -- files


def _files(name: _Name, known: Sequence[str]) -> tuple[str, ...]:
    near = {file: _nearness(name.path, file) for file in known}
    least = min(near.values(), default=_Near.NOT)
    if least is _Near.NOT:
        raise UsageError(f"{name.text}: no test file is called so, or begins so.{_suggestion(name.path, known)}")
    return tuple(file for file in known if near[file] is least)


def _nearness(path: str, file: str) -> _Near:
    if PurePosixPath(file).is_relative_to(path):
        return _Near.PATH
    wanted, parts = _parts(path), _parts(file)
    places = range(len(parts) - len(wanted) + 1) if wanted else ()
    if any(parts[place : place + len(wanted)] == wanted for place in places):
        return _Near.PART
    begins = any(_begins(parts[place : place + len(wanted)], wanted) for place in places)
    return _Near.BEGINNING if begins else _Near.NOT


def _parts(path: str) -> list[str]:
    """Of a path, or of a module's dotted name."""
    path = path.strip("/").removesuffix(".py")
    return [part for part in path.replace(".", "/").split("/") if part]


def _begins(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return parts[:-1] == wanted[:-1] and parts[-1].startswith(wanted[-1])


def _suggestion(path: str, known: Sequence[str]) -> str:
    """Paths for a path; for a name without folders names without folders."""
    return nearest(path, known if "/" in path else {_parts(file)[-1] for file in known})


# -- tests


def _means(name: _Name, known: Sequence[Test], files: Sequence[str]) -> Callable[[TestId], bool]:
    in_files = frozenset(_files(name, files))
    if not name.inner:
        return lambda test: test.file in in_files
    there = [test.id for test in known if test.id.file in in_files]
    for meant in (_exactly(name.inner), _beginning(name.inner)):
        tests = frozenset(test for test in there if meant(test))
        if tests:
            return tests.__contains__
    if in_files - {test.file for test in there}:
        return lambda test: False  # it may be in a file whose tests are not known
    names = ["::".join(part) for test in there for part in ((test.cls,), (test.method,), (test.cls, test.method))]
    raise UsageError(f"{name.text}: no test there is called so, or begins so.{nearest('::'.join(name.inner), names)}")


def _exactly(inner: Sequence[str]) -> Callable[[TestId], bool]:
    return lambda test: tuple(inner) in ((test.cls,), (test.cls, test.method), (test.method,))


def _beginning(inner: Sequence[str]) -> Callable[[TestId], bool]:
    if len(inner) == 1:
        return lambda test: test.cls.startswith(inner[0]) or test.method.startswith(inner[0])
    return lambda test: len(inner) == 2 and test.cls == inner[0] and test.method.startswith(inner[1])
