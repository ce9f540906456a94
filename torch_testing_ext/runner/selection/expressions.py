"""Expressions of -k and -m: words, and, or, not and parentheses, as in pytest.

A word of -k is a part of a name, or a pattern with *, as in unittest. A word of -m is the name of a mark of pytest.

expression := conjunction ("or" conjunction)*
conjunction := negation ("and" negation)*
negation := "not" negation | "(" expression ")" | WORD
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from ..model import Test, TestId
from ..options.options import UsageError

Matches = Callable[[TestId], bool]
MatchesMarks = Callable[[Test], bool]
_Predicate = Callable[[Any], bool]
_TOKEN = re.compile(r"[()]|[^\s()]+")


def parse_expression(text: str) -> Matches:
    """Returns a predicate on tests by their names. Raises UsageError that shows the position of a mistake."""
    return _Parser(text, "-k", "a part of a name", _word).parse()


def parse_marks(text: str) -> MatchesMarks:
    """Likewise, by their marks. Those of a test that cannot be collected are not known: it matches."""
    matches = _Parser(text, "-m", "the name of a mark", lambda name: lambda test: name in (test.marks or ())).parse()
    return lambda test: test.marks is None or matches(test)


class _Parser:
    def __init__(self, text: str, option: str, word: str, read: Callable[[str], _Predicate]):
        self._text = text
        self._option = option
        self._word = word
        self._read = read
        self._tokens = [(match.group(), match.start()) for match in _TOKEN.finditer(text)]

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
            return inner if self._take(")") else self._wrong("'and', 'or' or ')'")
        if not self._tokens or self._tokens[0][0] in ("and", "or", ")"):
            self._wrong(f"{self._word}, 'not' or '('")
        return self._read(self._tokens.pop(0)[0])

    def _take(self, token: str) -> bool:
        found = bool(self._tokens) and self._tokens[0][0] == token
        if found:
            del self._tokens[0]
        return found

    def _wrong(self, expected: str) -> _Predicate:
        place = f"{self._tokens[0][0]!r} at column {self._tokens[0][1] + 1}" if self._tokens else "the end"
        raise UsageError(f"{self._option} {self._text!r}: expected {expected}, found {place}")


def _word(word: str) -> Matches:
    """A plain word ignores case and may be anywhere in the name, as in pytest; a pattern matches as in unittest."""
    if "*" in word:
        # Also by the name that unittest gives it in its own folder.
        modules = (_module, lambda test: PurePath(test.file).stem)
        return lambda test: any(fnmatchcase(f"{module(test)}.{test.dotted}", word) for module in modules)
    return lambda test: word.lower() in f"{_module(test)}.{test.dotted}".lower() or word.lower() in str(test).lower()


def _module(test: TestId) -> str:
    return test.file.removesuffix(".py").replace("/", ".")
