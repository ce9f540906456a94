"""Expressions of -k and -m: words, and, or, not and parentheses.

A word of -k is a part of a name, or a pattern with *, as in unittest. A word of -m is the name of a mark of pytest.

expression  := conjunction ("or" conjunction)*
conjunction := negation ("and" negation)*
negation    := "not" negation | "(" expression ")" | WORD
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, NoReturn

from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import UsageError

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
        # The tokens with their positions.
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
