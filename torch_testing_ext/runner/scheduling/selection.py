"""Finds test files, and selects files and tests by name and mark."""

from __future__ import annotations

import difflib
import enum
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NoReturn

from torch_testing_ext._process.words import nearest
from torch_testing_ext.runner.command_line import COMMANDS
from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import Options, UsageError

# --------------------------------------------------------------------------------------------------------------------
# Finds the test files: below the test directories, and below the paths that the user names.

_NOWHERE = (
    "no tests found: {root} has no folder test or tests and no test_*.py, and pytest has no testpaths. Name a folder "
    "or file, or set tests in [tool.torch_testing_ext] of pyproject.toml"
)

# As pytest's norecursedirs, which has virtual environments, too.
_OTHERS = ("build", "dist", "node_modules")


def test_files(options: Options, root: Path, cwd: Path) -> tuple[str, ...]:
    """Their paths relative to the root, sorted. Raises UsageError."""
    paths = []
    for text in (*options.names, *options.include):
        name, _ = split_name(text, root, cwd)
        path = _existing(name, cwd, root) if name else None
        if path is not None:
            paths.append(path)
    pointed_to = []
    for path in paths:
        if path.is_dir() or (path.suffix == ".py" and path.is_file()):
            pointed_to.append(path)
    configured = list(options.tests)
    if pointed_to:
        configured = [place for place in configured if place.exists()]
    if not configured and not paths:
        raise UsageError(_NOWHERE.format(root=root))
    names = set()
    for file in files_below((*configured, *pointed_to)):
        names.add(relative_to(root, file))
    return tuple(sorted(names))


test_files.__test__ = False  # type: ignore[attr-defined]  # its name looks like a test to pytest


def split_name(name: str, root: Path, cwd: Path) -> tuple[str, str]:
    """The path of a name, and the class and test after `::`; the path may have a `::` in it if it exists."""
    parts = name.split("::")
    for length in range(len(parts), 0, -1):
        path = "::".join(parts[:length])
        if path and (_exists(cwd / path) or _exists(root / path)):
            return path, "::".join(parts[length:])
    return parts[0], "::".join(parts[1:])


def _existing(name: str, *places: Path) -> Path | None:
    for place in places:
        if _exists(place / name):
            return place / name
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # A name that no path can have: too long, or with a zero.
        return False


def files_below(places: Iterable[Path]) -> Iterator[Path]:
    """The test files below folders, but for those in folders that have others' code, and the files among the places."""
    for place in places:
        if place.is_file():
            yield place
        elif place.is_dir():
            yield from _walk(place)
        else:
            raise UsageError(
                f"test directory {place} does not exist; the setting `tests` names the directories to search"
            )


def _walk(folder: Path, trees: tuple[Path, ...] = ()) -> Iterator[Path]:
    """`trees`: what is being walked; a link out of them is followed, since nothing else leads there."""
    trees = (*trees, folder.resolve())
    for directory, folders, files in os.walk(folder, onerror=_refuse):
        is_virtual_environment = "pyvenv.cfg" in files and directory != str(folder)
        if is_virtual_environment:
            folders.clear()
            continue
        folders[:] = [name for name in folders if _may_have_tests(name)]
        for name in files:
            if name.startswith("test_") and name.endswith(".py"):
                yield Path(directory, name)
        for name in folders:
            link = Path(directory, name)
            if link.is_symlink() and not _overlaps(link.resolve(), trees):
                yield from _walk(link, trees)


def _may_have_tests(folder: str) -> bool:
    return not folder.startswith((".", "__")) and folder not in _OTHERS


def _overlaps(target: Path, trees: tuple[Path, ...]) -> bool:
    """Whether one of these trees has the folder, or is in it."""
    for tree in trees:
        if target.is_relative_to(tree):
            return True
        if tree.is_relative_to(target):
            return True
    return False


def _refuse(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}")


def relative_to(root: Path, path: Path) -> str:
    """The path by its own name if that is below the root, else by that of what a link leads to."""
    root = root.resolve()
    for place in (Path(os.path.abspath(path)), path.resolve()):
        if place.is_relative_to(root):
            return place.relative_to(root).as_posix()
    raise UsageError(f"{path} is outside {root}: names of tests are relative to that directory")


# --------------------------------------------------------------------------------------------------------------------
# Expressions of -k and -m: words, and, or, not and parentheses, as in pytest.
#
# A word of -k is a part of a name, or a pattern with *, as in unittest. A word of -m is the name of a mark of pytest.
#
#     expression  := conjunction ("or" conjunction)*
#     conjunction := negation ("and" negation)*
#     negation    := "not" negation | "(" expression ")" | WORD

Matches = Callable[[TestId], bool]
MatchesMarks = Callable[[Test], bool]
_Predicate = Callable[[Any], bool]
_TOKEN = re.compile(r"[()]|[^\s()]+")


def parse_expression(text: str) -> Matches:
    """Returns a predicate on tests by their names. Raises UsageError that shows the position of a mistake."""
    return _Parser(text, "-k", "a part of a name", _word).parse()


def parse_marks(text: str) -> MatchesMarks:
    """Returns a predicate on tests by their marks. It is true for a test that cannot be collected: it has no known."""
    matches = _Parser(text, "-m", "the name of a mark", _mark).parse()

    def matches_or_unknown(test: Test) -> bool:
        return test.marks is None or matches(test)

    return matches_or_unknown


class _Parser:
    def __init__(
        self,
        text: str,
        option: str,
        word: str,
        read: Callable[[str], _Predicate],
    ):
        self._text = text
        self._option = option
        self._word = word
        self._read = read
        # With their positions.
        self._tokens: list[tuple[str, int]] = []
        for match in _TOKEN.finditer(text):
            self._tokens.append((match.group(), match.start()))

    def parse(self) -> _Predicate:
        matches = self._expression()
        if self._tokens:
            self._wrong("'and', 'or' or the end")
        return matches

    def _expression(self) -> _Predicate:
        parts = [self._conjunction()]
        while self._take("or"):
            parts.append(self._conjunction())
        return lambda test: any(matches(test) for matches in parts)

    def _conjunction(self) -> _Predicate:
        parts = [self._negation()]
        while self._take("and"):
            parts.append(self._negation())
        return lambda test: all(matches(test) for matches in parts)

    def _negation(self) -> _Predicate:
        if self._take("not"):
            matches = self._negation()
            return lambda test: not matches(test)
        if self._take("("):
            inner = self._expression()
            if not self._take(")"):
                self._wrong("'and', 'or' or ')'")
            return inner
        if self._next in ("", "and", "or", ")"):
            self._wrong(f"{self._word}, 'not' or '('")
        word, _ = self._tokens.pop(0)
        return self._read(word)

    @property
    def _next(self) -> str:
        """The next token; empty at the end."""
        if not self._tokens:
            return ""
        token, _ = self._tokens[0]
        return token

    def _take(self, token: str) -> bool:
        if self._next != token:
            return False
        del self._tokens[0]
        return True

    def _wrong(self, expected: str) -> NoReturn:
        place = "the end"
        if self._tokens:
            token, position = self._tokens[0]
            place = f"{token!r} at column {position + 1}"
        raise UsageError(f"{self._option} {self._text!r}: expected {expected}, found {place}")


def _word(word: str) -> Matches:
    """A plain word ignores case and may be anywhere in the name, as in pytest; a pattern matches as in unittest."""

    def pattern_matches(test: TestId) -> bool:
        by_path = f"{_module(test)}.{test.dotted}"
        # The name that unittest gives it in its own folder.
        in_folder = f"{PurePath(test.file).stem}.{test.dotted}"
        return fnmatchcase(by_path, word) or fnmatchcase(in_folder, word)

    def is_part(test: TestId) -> bool:
        part = word.lower()
        dotted = f"{_module(test)}.{test.dotted}"
        return part in dotted.lower() or part in str(test).lower()

    return pattern_matches if "*" in word else is_part


def _mark(name: str) -> MatchesMarks:
    def has_mark(test: Test) -> bool:
        return test.marks is not None and name in test.marks

    return has_mark


def _module(test: TestId) -> str:
    return test.file.removesuffix(".py").replace("/", ".")


# --------------------------------------------------------------------------------------------------------------------
# Selects files and tests by name. Pure: names in, names out.
#
# A name selects its closest matches: files and folders with exactly this path; else paths that contain it; else paths
# that contain it if its last part may be the beginning of a file's or folder's name. `::` adds a class and a test.

_CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)
_MARK = re.compile(r"\bmark\.(\w+)")


class _Closeness(enum.IntEnum):
    """The closeness of a name to a file; smaller is closer."""

    # The file itself, or a folder that contains it.
    PATH = 0
    # Consecutive whole parts of its path.
    PART = 1
    # Likewise, but only the beginning of the last part.
    BEGINNING = 2
    NONE = 3


@dataclass(frozen=True)
class _Name:
    """A name as the user wrote it."""

    text: str
    path: str
    # A class, a test, or both with :: between them; the name of a test may have a :: in it, too.
    inner: str

    @classmethod
    def read(cls, text: str, root: Path, cwd: Path) -> _Name:
        path, inner = split_name(text, root, cwd)
        return cls(text, _from_root(path, root, cwd), inner)


def _from_root(path: str, root: Path, cwd: Path) -> str:
    """A path that exists in the working directory, relative to the root; any other name unchanged."""
    try:
        if path and (cwd / path).exists():
            return relative_to(root, cwd / path)
    except (OSError, ValueError, UsageError):
        # It is too long for a path, or has a zero; or it is outside of the root.
        pass
    return path


@dataclass(frozen=True)
class Selection:
    """The selection of the user, applied in two steps: to files before they are imported, to tests afterwards."""

    included: tuple[_Name, ...]
    excluded: tuple[_Name, ...]
    matches: tuple[Matches, ...]
    marks: tuple[MatchesMarks, ...] = ()
    # The beginnings of the ids of tests that do not run.
    deselected: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Selection:
        """The selection that the options describe. Raises UsageError."""

        def read(names: Iterable[str]) -> tuple[_Name, ...]:
            return tuple(_Name.read(name, root, cwd) for name in names)

        return cls(
            included=read((*options.names, *options.include)),
            excluded=read(options.exclude),
            matches=tuple(parse_expression(text) for text in options.keyword),
            marks=tuple(parse_marks(text) for text in options.marks),
            deselected=options.deselect,
        )

    def files(self, known: Sequence[str]) -> tuple[str, ...]:
        """The files to import. Raises UsageError."""
        selected = set() if self.included else set(known)
        for name in self.included:
            selected.update(_files(name, known))
        for name in self.excluded:
            if not name.inner:
                selected.difference_update(_files(name, known))
        return tuple(file for file in known if file in selected)

    def tests(self, known: Sequence[Test], files: Sequence[str]) -> tuple[Test, ...]:
        """The tests to run, of those in imported files; broken and unselected files have none. Raises UsageError."""
        included = [_predicate(name, known, files, or_unknown=True) for name in self.included]
        excluded = [_predicate(name, known, files, or_unknown=False) for name in self.excluded]

        def is_wanted(test: Test) -> bool:
            if included and not any(matches(test.id) for matches in included):
                return False
            if any(matches(test.id) for matches in excluded) or str(test.id).startswith(self.deselected):
                return False
            return self._keyword_selects(test.id) and self._marks_select(test)

        return tuple(test for test in known if is_wanted(test))

    def _keyword_selects(self, test: TestId) -> bool:
        if not self.matches:
            return True
        return any(matches(test) for matches in self.matches)

    def _marks_select(self, test: Test) -> bool:
        if not self.marks:
            return True
        return any(matches(test) for matches in self.marks)

    def may_select_from(self, file: str, source: str) -> bool:
        """May a file that cannot be imported have a test that -k and -m select, by the names in its source?"""
        classes = ("", *_CLASS.findall(source))
        functions = ("", *_FUNCTION.findall(source))
        tests = [TestId(file, cls, name) for cls in classes for name in functions]
        if not any(self._keyword_selects(test) for test in tests):
            return False
        marks = tuple(_MARK.findall(source))
        without_marks = Test(tests[0], marks=())
        with_all_marks = Test(tests[0], marks=marks)
        return self._marks_select(without_marks) or self._marks_select(with_all_marks)


# -- files


def _files(name: _Name, known: Sequence[str]) -> tuple[str, ...]:
    """The files that a name means: all that are closest to it."""
    closeness = {file: _closeness(name.path, file) for file in known}
    closest = min(closeness.values(), default=_Closeness.NONE)
    if closest is _Closeness.NONE:
        candidates = set(known)
        if "/" not in name.path:
            candidates = {_parts(file)[-1] for file in known}
        command = difflib.get_close_matches(name.text, COMMANDS, 1, cutoff=0.7)
        alike = f" Did you mean the command {command[0]}?" if command else nearest(name.path, candidates)
        raise UsageError(f"{name.text}: no test file has this name or starts with it.{alike}")
    return tuple(file for file in known if closeness[file] is closest)


def _closeness(path: str, file: str) -> _Closeness:
    """The closeness of a file to the path in a name."""
    if PurePosixPath(file).is_relative_to(path):
        return _Closeness.PATH
    wanted = _parts(path)
    if not wanted:
        return _Closeness.NONE
    parts = _parts(file)
    length = len(wanted)
    windows = [parts[start : start + length] for start in range(len(parts) - length + 1)]
    if wanted in windows:
        return _Closeness.PART
    for *folders, name in windows:
        if folders == wanted[:-1] and name.startswith(wanted[-1]):
            return _Closeness.BEGINNING
    return _Closeness.NONE


def _parts(path: str) -> list[str]:
    """The parts of a path, or of a module's dotted name."""
    path = path.strip("/").removesuffix(".py")
    parts = path.replace(".", "/").split("/")
    return [part for part in parts if part]


# -- tests


def _predicate(
    name: _Name,
    known: Sequence[Test],
    files: Sequence[str],
    or_unknown: bool,
) -> Callable[[TestId], bool]:
    """`or_unknown`: a file that skips all of its tests may have the test, so it is selected."""
    in_files = frozenset(_files(name, files))
    if not name.inner:
        return lambda test: test.file in in_files
    candidates = []
    skipped = set()
    for test in known:
        if test.id.file not in in_files:
            continue
        if test.id.method:
            candidates.append(test.id)
        elif or_unknown:
            skipped.add(test.id)
    tests = _meant(name.inner, candidates)
    if tests:
        return (tests | skipped).__contains__
    files_with_tests = {test.file for test in candidates}
    if in_files - files_with_tests:
        # The test may be in a file whose tests are unknown: it is broken or skips them all.
        return skipped.__contains__
    names: list[str] = []
    for candidate in candidates:
        names += _parts_of(candidate)
    alike = nearest(name.inner, names)
    raise UsageError(f"{name.text}: no test in these files has this name or starts with it.{alike}")


def _meant(inner: str, candidates: Sequence[TestId]) -> set[TestId]:
    """The tests of exactly this name; else of pytest with any parameters; else those whose name begins so."""

    def has_name(part: str) -> bool:
        return part == inner

    def has_name_and_parameters(part: str) -> bool:
        return part.startswith(f"{inner}[")

    def begins_so(part: str) -> bool:
        return part.startswith(inner)

    for is_meant in (has_name, has_name_and_parameters, begins_so):
        tests = set()
        for test in candidates:
            if any(is_meant(part) for part in _parts_of(test)):
                tests.add(test)
        if tests:
            return tests
    return set()


def _parts_of(test: TestId) -> tuple[str, ...]:
    """The names that the user may write after the file: the class, the test, or both."""
    if not test.cls:
        return (test.method,)
    return (test.cls, test.method, f"{test.cls}::{test.method}")
