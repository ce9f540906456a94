"""Tests that do not run since somebody has disabled them by name: lists of names, reasons and issues.

A list is a text, of which each line is `ID # reason and issue`; or PyTorch's JSON: by `test_x (__main__.Class)`, the
issue and the platforms.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_testing_ext._process.words import nearest
from torch_testing_ext.runner.model import Test
from torch_testing_ext.runner.options import UsageError

# The parts of names that PyTorch adds for devices and types of data, as its own comparison leaves them out.
_OF_TYPE = re.compile(
    r"(?:_(?:cpu|cuda|xpu|mps|hpu|meta|lazy|xla|privateuse1))?_(?:bool|b?float\d+|u?int\d+|complex\d+)$"
)
_OF_PYTORCH = re.compile(r"(\S+) \(([\w.]+)\)")
_VARIABLES = {"asan": "ASAN", "dynamo": "DYNAMO", "dynamo_wrapped": "DYNAMO", "inductor": "INDUCTOR", "slow": "SLOW"}


@dataclass(frozen=True)
class DisabledTest:
    """The tests of one name, and why they do not run."""

    name: str
    why: str
    # The platforms, of those that PyTorch names; none for all.
    platforms: tuple[str, ...] = ()

    def means(self, test: Test) -> bool:
        """Whether a test has this name: its id, or the beginning of it, or as PyTorch names it."""
        of_pytorch = _OF_PYTORCH.fullmatch(self.name)
        if of_pytorch is None:
            # The whole id, a class, a file; or all parameters of a test.
            return re.match(re.escape(self.name) + r"(::|\[|$)", str(test.id)) is not None
        method = test.id.method.partition("[")[0]
        is_class = test.id.cls.startswith(of_pytorch[2].rpartition(".")[2])
        return bool(test.id.cls) and is_class and of_pytorch[1] in (method, _OF_TYPE.sub("", method))


def read_lists(files: Iterable[Path]) -> tuple[DisabledTest, ...]:
    """The tests in these files. Raises UsageError."""
    disabled: list[DisabledTest] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--disabled {file}: {getattr(error, 'strerror', None) or error}") from None
        read = _of_json if text.lstrip().startswith("{") else _of_lines
        try:
            disabled += read(text)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"--disabled {file}: {error}") from None
    return tuple(disabled)


def _of_lines(text: str) -> Iterator[DisabledTest]:
    for number, line in enumerate(text.splitlines(), 1):
        name, _, why = (part.strip() for part in line.partition(" #"))
        if not name or name.startswith("#"):
            continue
        if not why:
            raise ValueError(f"line {number} gives no reason: write {name} # why, and the issue")
        yield DisabledTest(name, why)


def _of_json(text: str) -> Iterator[DisabledTest]:
    """PyTorch's: by name the issue and the platforms, in its condensed form with the number of the issue before it."""
    for name, facts in json.loads(text).items():
        if not isinstance(facts, Sequence) or not 2 <= len(facts) <= 3 or not _are_words(facts[-1]):
            raise ValueError(f"{name!r} has neither an issue with platforms, nor a number, an issue and platforms")
        yield DisabledTest(name, str(facts[-2]), tuple(facts[-1]))


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def without_disabled(
    tests: Iterable[Test],
    disabled: Sequence[DisabledTest],
    kind: str | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Test, ...]:
    """The tests, of which those that are disabled here are skipped. `kind`: of the accelerators of the run."""
    here = [each for each in disabled if _is_here(each.platforms, kind, environ)]
    of_tests = [(test, next((each.why for each in here if each.means(test)), None)) for test in tests]
    return tuple(test if why is None else replace(test, skip=f"disabled: {why}", want=None) for test, why in of_tests)


def _is_here(names: Sequence[str], kind: str | None, environ: Mapping[str, str]) -> bool:
    """Whether a test is disabled on one of these platforms here. Unknown ones do not count, as in PyTorch."""
    known = [_PLATFORMS[name](kind, environ) for name in names if name in _PLATFORMS]
    return not known or any(known)


def _of_variable(name: str) -> Callable[[str | None, Mapping[str, str]], bool]:
    return lambda kind, environ: environ.get(f"PYTORCH_TEST_WITH_{name}", "0") == "1"


_PLATFORMS: dict[str, Callable[[str | None, Mapping[str, str]], bool]] = {
    **dict.fromkeys(("mac", "macos"), lambda kind, environ: sys.platform == "darwin"),
    **dict.fromkeys(("win", "windows"), lambda kind, environ: sys.platform == "win32"),
    "linux": lambda kind, environ: sys.platform.startswith("linux"),
    "rocm": lambda kind, environ: kind == "hip" or environ.get("PYTORCH_TEST_WITH_ROCM", "0") == "1",
    "xpu": lambda kind, environ: kind == "xpu",
    **{name: _of_variable(variable) for name, variable in _VARIABLES.items()},
}


def stale(disabled: Iterable[DisabledTest], tests: Sequence[Test], files: Sequence[str]) -> Iterator[str]:
    """A warning for each id that no test has any more. `files`: all that there are; `tests`: of the imported ones."""
    imported = {test.id.file for test in tests}
    for each in disabled:
        if _OF_PYTORCH.fullmatch(each.name) or any(each.means(test) for test in tests):
            continue
        file = each.name.partition("::")[0]
        if file in imported or file not in files:
            names = [str(test.id) for test in tests if test.id.file == file] or files
            yield f"--disabled: no test has the name {each.name}.{nearest(each.name, names)}"
