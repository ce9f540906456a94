"""The test of the source that a result is of, whatever form of its name the runner has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from torch_testing_ext.runner.model import TestId

from .definitions import DefinedFile, DefinedTest

# Bases from elsewhere that say nothing of what a class is for.
_WITHOUT_MEANING = ("object", "ABC", "Generic", "Protocol")


def without_parameters(name: str) -> str:
    return name.partition("[")[0] if name.endswith("]") else name


class Matcher:
    """Finds the definition of a result: by its file, its classes with those that they inherit from, and its name."""

    def __init__(self, files: Sequence[DefinedFile]):
        self._files = {file.file: file for file in files}
        self._by_name: dict[str, list[DefinedTest]] = defaultdict(list)
        self._bases: dict[str, set[str]] = defaultdict(set)
        self._why_never: dict[tuple[str, str], str] = {}
        self._stems: dict[str, list[str]] = defaultdict(list)
        for file in files:
            self._stems[PurePosixPath(file.file).stem].append(file.file)
            for cls in file.classes:
                self._bases[cls.name.rpartition("::")[2]] |= set(cls.bases)
                self._why_never[file.file, cls.name] = cls.why_never
            for test in file.tests:
                self._by_name[test.id.method].append(test)
        self._inherited = frozenset().union(*self._bases.values())

    def why_never(self, test: TestId) -> str:
        """Say why pytest collects nothing of its class, nor of another one that inherits its tests."""
        cls = test.cls
        while cls:
            why = self._why_never.get((test.file, cls), "")
            last = cls.rpartition("::")[2]
            if why and last not in self._inherited and not self._is_of_unittest(last):
                return f"its class is not collected: {why}"
            cls = cls.rpartition("::")[0]
        return ""

    def has_no_tests(self, test: TestId) -> bool:
        """Whether its class is for something else by what it inherits, such as a model with a method `test_step`."""
        last = test.cls.rpartition("::")[2]
        if not self._why_never.get((test.file, test.cls)) or self._is_of_unittest(last):
            return False
        return any(name not in self._bases and name not in _WITHOUT_MEANING for name in self._ancestors(last))

    def _is_of_unittest(self, cls: str) -> bool:
        """Whether a class is a TestCase, as far as the files say: one from elsewhere is, if its name has "Test"."""
        above = self._ancestors(cls)
        return any(name.endswith("TestCase") or ("Test" in name and name not in self._bases) for name in above)

    def _ancestors(self, cls: str) -> set[str]:
        """The class and all that it inherits from, by name."""
        waiting, seen = [cls], {cls}
        while waiting:
            bases = self._bases.get(waiting.pop(), set()) - seen
            waiting += bases
            seen |= bases
        return seen

    def matches(self, test: TestId, is_foreign: bool) -> tuple[DefinedTest, ...]:
        """The definitions that a result may be of: one, several if its name does not say more, or none."""
        name = without_parameters(test.method)
        candidates = self._by_name.get(name, []) or self._generated_from(name)
        scored: list[tuple[int, DefinedTest]] = []
        for candidate in candidates:
            fits = self._foreign_fit(test, candidate) if is_foreign else self._own_fit(test, candidate)
            if fits:
                scored.append((fits, candidate))
        best = max((fits for fits, _ in scored), default=0)
        found = [candidate for fits, candidate in scored if fits == best]
        # The last one of its name is the one that runs.
        if found and len({candidate.id for candidate in found}) == 1:
            return (found[-1],)
        return tuple(found)

    def of_class(self, test: TestId) -> tuple[DefinedTest, ...]:
        """The tests of a class for which one result of another runner stands."""
        words = test.cls.split(".")
        fits = [each for each in self._files.values() if not test.file or _paths_end_alike(test.file, each.file)]
        tests = [each for file in fits for each in file.tests if each.id.cls.split("::")[-1] == words[-1]]
        best = max((_alike(_module(each.id.file), words[:-1]) for each in tests), default=0)
        return tuple(each for each in tests if _alike(_module(each.id.file), words[:-1]) == best)

    def place(self, path: str) -> str | None:
        """The file of the project that a path of any machine names; None if it names none."""
        found = [file for file in self._stems.get(PurePosixPath(path).stem, ()) if _paths_end_alike(path, file)]
        return max(found, key=lambda file: file.count("/"), default=None)

    def file_of(self, test: TestId, is_foreign: bool) -> str | None:
        """The file that a result stands for, if it is one of a whole file: it skips itself, or cannot be imported."""
        if not is_foreign:
            return test.file if not test.method and test.file in self._files else None
        # pytest has the module as the name, with an empty class; or the path.
        dotted = ".".join(part for part in (test.cls, test.method) if part)
        words = [word for word in dotted.removesuffix(".py").replace("/", ".").split(".") if word]
        if not words:
            return None
        files = [file for file in self._stems.get(words[-1], ()) if _ends_alike(_module(file), words)]
        return files[0] if len(files) == 1 else None

    def _generated_from(self, name: str) -> list[DefinedTest]:
        """Definitions from which a decorator makes tests with longer names: `test_x` makes `test_x_cpu_float32`."""
        parts = name.split("_")
        for length in range(len(parts) - 1, 1, -1):
            shorter = "_".join(parts[:length])
            if found := self._by_name.get(shorter):
                return found
        return []

    def _own_fit(self, test: TestId, candidate: DefinedTest) -> int:
        is_of_file = test.file == candidate.id.file
        if is_of_file and test.cls == candidate.id.cls:
            return 3
        if not self._inherits(test.cls, candidate.id.cls):
            return 0
        return 2 if is_of_file else 1

    def _foreign_fit(self, test: TestId, candidate: DefinedTest) -> int:
        """The number of parts of a dotted name that fit."""
        words = [word for word in test.cls.replace("::", ".").replace("/", ".").split(".") if word]
        words = [word for word in words if word not in ("__main__", "py")]
        module = _module(candidate.id.file)
        classes = candidate.id.cls.split("::") if candidate.id.cls else []
        if classes and words and words[-1] != classes[-1] and self._inherits(words[-1], classes[-1]):
            words = [*words[:-1], *classes]
            module_fits = 0
        else:
            module_fits = 1
        if classes and (not words or words[-len(classes) :] != classes):
            return 0
        before = words[: len(words) - len(classes)] if classes else words
        if test.file:
            if not _paths_end_alike(test.file, candidate.id.file):
                return 0 if module_fits else 1
            return 100
        if not before:
            return 1 if classes else 0
        fits = _alike(module, before)
        if not fits and not module_fits:
            return 1
        return fits + 1 if fits else 0

    def _inherits(self, cls: str, base: str) -> bool:
        """Whether a class has the other among those that it inherits from, by name."""
        above = self._ancestors(cls.rpartition("::")[2])
        return any(base.rpartition("::")[2] in self._bases.get(name, ()) for name in above)


def _module(file: str) -> list[str]:
    return file.removesuffix(".py").split("/")


def _alike(module: Sequence[str], words: Sequence[str]) -> int:
    """The number of parts in which a module and a dotted name agree at their ends, if one is the end of the other."""
    length = min(len(module), len(words))
    return length if length and list(module[-length:]) == list(words[-length:]) else 0


def _ends_alike(module: Sequence[str], words: Iterable[str]) -> bool:
    return _alike(module, list(words)) > 0


def _paths_end_alike(one: str, other: str) -> bool:
    return _alike(PurePosixPath(one).parts, PurePosixPath(other).parts) > 0
