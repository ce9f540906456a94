"""The tests that the configuration of CI names: those that its commands run, and places that do not exist."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import escape, glob
from itertools import pairwise
from pathlib import Path, PurePosixPath

from torch_testing_ext._process.logs import text_of

_CONFIGURATIONS = (
    *(".github/workflows/*.yml", ".github/workflows/*.yaml", ".gitlab-ci.yml", ".gitlab/**/*.yml"),
    *(".buildkite/**/*.yml", ".buildkite/**/*.yaml", ".circleci/*.yml", "azure-pipelines.yml", "Jenkinsfile"),
)
# What jobs call to run tests.
_CALLED = ("Makefile", "tox.ini", "noxfile.py")
_COMMENT = re.compile(r"(^|\s)#.*")
# What a command writes.
_WRITTEN = re.compile(r"(--out\S*[ =]|>)\s*\S+")
_SEPARATORS = re.compile(r"&&|\|\||;")
_RUNNER = re.compile(r"""(?:^|[\s"'(/])(py\.?test|torchtest|python[\d.]*|torchrun|unittest)(?=[\s"']|$)""")
_TEST_RUNNERS = ("pytest", "py.test", "torchtest")
_WITH_VALUE = ("-m", "-name", "-n", "-p", "-c", "-o", "-W", "--rootdir", "--junitxml", "--deselect", "--nproc-per-node")


@dataclass(frozen=True)
class TestCommand:
    """A command of CI that runs tests."""

    __test__ = False  # not a test for pytest to collect

    # Files and folders, relative to the root; none: whatever the settings say, or a variable of the job.
    places: tuple[str, ...]
    ignored: tuple[str, ...]

    def names(self, places: frozenset[str]) -> bool:
        """Whether it names a file, given as its path and all folders above it."""
        return places.isdisjoint(self.ignored) and not (self.places and places.isdisjoint(self.places))


@dataclass(frozen=True)
class CiJobs:
    """The jobs of CI, as far as their configuration can be read without a parser for each service."""

    commands: tuple[TestCommand, ...] = ()
    # Places below the folders of tests that the configuration names and that do not exist, each in words.
    dead: tuple[str, ...] = ()

    def names(self, file: str) -> bool:
        """Whether a command may run tests of a file: each may if no command is known."""
        places = frozenset([file, *map(str, PurePosixPath(file).parents)])
        return not self.commands or any(command.names(places) for command in self.commands)


def read_ci_jobs(root: Path, places: Sequence[Path]) -> CiJobs:
    """The jobs of a project with tests in these folders."""
    reader = _Reader(root, [place.relative_to(root) for place in places])
    commands: list[TestCommand] = []
    dead: list[str] = []
    for file in _files(root, _CONFIGURATIONS):
        text = text_of(file)
        commands += reader.commands(text)
        dead += [f"{file.relative_to(root).as_posix()}:{line} names {path}" for line, path in reader.dead(text)]
    for file in _files(root, _CALLED):
        commands += reader.commands(text_of(file))
    return CiJobs(tuple(dict.fromkeys(commands)), tuple(dead))


def _files(root: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(file for file in root.glob(pattern) if file.is_file())


class _Reader:
    """Reads texts of configuration for the paths in them."""

    def __init__(self, root: Path, places: Sequence[Path]):
        self._root = root
        self._places = [PurePosixPath(place.as_posix()) for place in places]
        tops = sorted({place.parts[0] for place in places if place.parts})
        self._known = {
            path.relative_to(root).as_posix() for place in places for path in (root / place, *(root / place).rglob("*"))
        }
        names = "|".join(map(re.escape, tops)) or r"(?!)"
        self._path = re.compile(rf"(?<![\w./-])(?:{names})/[\w./-]*[\w-]")

    def dead(self, text: str) -> Iterator[tuple[int, str]]:
        """Paths in vain, with their lines. A filter may also be the beginning of a path; what a job writes is none."""
        for number, line in enumerate(text.splitlines(), 1):
            for path in self._path.findall(_WRITTEN.sub("", _COMMENT.sub("", line))):
                is_there = glob(f"{escape(path)}*", root_dir=self._root)
                if not is_there and PurePosixPath(path).suffix in ("", ".py"):
                    yield number, path

    def commands(self, text: str) -> Iterator[TestCommand]:
        for line in self._whole_lines(text):
            for part in _SEPARATORS.split(line):
                runner = _RUNNER.search(part)
                if runner and "install" not in part[: runner.start()]:
                    # Files that `find` gives to a runner.
                    start = part.find("find ", 0, runner.start())
                    yield from self._command(part[start if start >= 0 else runner.start(1) :])

    def _whole_lines(self, text: str) -> Iterator[str]:
        """Lines without comments, with those that go on in the next one put together."""
        whole = ""
        for commented in re.sub(r"\\\n", " ", text).splitlines():
            line = _COMMENT.sub("", commented)
            words = line.split()
            if not words:
                continue
            # Of a folded block of YAML: an option or a path begins no command.
            if re.match(r"-\S", words[0]) or self._found(words[0]):
                whole += f" {line}"
            else:
                yield whole
                whole = line
        yield whole

    def _command(self, text: str) -> Iterator[TestCommand]:
        text = re.sub(r"""["']\s*,\s*["']""", " ", text)
        try:
            words = shlex.split(text)
        except ValueError:
            words = [word.strip("\"'()[],") for word in text.split()]
        is_of_tests = any(PurePosixPath(word).name in _TEST_RUNNERS for word in words)
        named: list[str] = []
        ignored: list[str] = []
        names_others = False
        for before, word in pairwise(words):
            option, _, value = word.partition("=")
            if "--ignore" in (option, before):
                ignored += self._found(value or word)
            elif before == "-k":
                names_others |= "not " not in word
            elif word.startswith("-") or before in _WITH_VALUE:
                continue
            elif found := self._found(word):
                named += [place for place in found if is_of_tests or place.endswith(".py")]
            elif word not in _TEST_RUNNERS and word != "." and "$" not in word:
                # Of another project, or of another folder of this one.
                names_others = True
        if named or (is_of_tests and not names_others):
            yield TestCommand(tuple(named), tuple(ignored))

    def _found(self, word: str) -> list[str]:
        """The files and folders of tests that a word of a command means, wherever the command is run."""
        parts = [part for part in word.partition("::")[0].split("/") if part not in ("", ".", "..")]
        for start in range(len(parts)):
            rest = "/".join(parts[start:])
            for folder in ("", *map(str, self._places)):
                pattern = str(PurePosixPath(folder, rest))
                if found := fnmatch.filter(self._known, pattern) if "*" in pattern else self._known & {pattern}:
                    return sorted(found)
        return []
