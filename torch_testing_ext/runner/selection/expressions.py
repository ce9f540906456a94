"""Expressions of -k: words, and, or, not and parentheses, as in pytest; a word with * is a pattern, as in unittest.

expression := conjunction ("or" conjunction)*
conjunction := negation ("and" negation)*
negation := "not" negation | "(" expression ")" | WORD
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from ..model import TestId
from ..options.options import UsageError

Matches = Callable[[TestId], bool]
_TOKEN = re.compile(r"[()]|[^\s()]+")


def parse_expression(text: str) -> Matches:
    """Returns a predicate on tests. Raises UsageError that shows the position of a mistake."""
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str):
        self._text = text
        self._tokens = [(match.group(), match.start()) for match in _TOKEN.finditer(text)]

    def parse(self) -> Matches:
        matches = self._expression()
        if self._tokens:
            self._wrong("'and', 'or' or the end")
        return matches

    def _expression(self) -> Matches:
        matches = self._conjunction()
        while self._take("or"):
            matches = _either(matches, self._conjunction())
        return matches

    def _conjunction(self) -> Matches:
        matches = self._negation()
        while self._take("and"):
            matches = _both(matches, self._negation())
        return matches

    def _negation(self) -> Matches:
        if self._take("not"):
            return _no(self._negation())
        if self._take("("):
            inner = self._expression()
            return inner if self._take(")") else self._wrong("'and', 'or' or ')'")
        if not self._tokens or self._tokens[0][0] in ("and", "or", ")"):
            self._wrong("a part of a name, 'not' or '('")
        return _word(self._tokens.pop(0)[0])

    def _take(self, token: str) -> bool:
        found = bool(self._tokens) and self._tokens[0][0] == token
        if found:
            del self._tokens[0]
        return found

    def _wrong(self, expected: str) -> Matches:
        place = f"{self._tokens[0][0]!r} at column {self._tokens[0][1] + 1}" if self._tokens else "the end"
        raise UsageError(f"-k {self._text!r}: expected {expected}, found {place}")


def _either(one: Matches, other: Matches) -> Matches:
    return lambda test: one(test) or other(test)


def _both(one: Matches, other: Matches) -> Matches:
    return lambda test: one(test) and other(test)


def _no(one: Matches) -> Matches:
    return lambda test: not one(test)


def _word(word: str) -> Matches:
    """A plain word ignores case and may be anywhere in the name, as in pytest; a pattern matches as in unittest."""
    if "*" in word:
        return lambda test: any(fnmatchcase(name, word) for name in (_dotted(test), _dotted_from_module(test)))
    return lambda test: word.lower() in _dotted(test).lower() or word.lower() in str(test).lower()


def _dotted(test: TestId) -> str:
    module = test.file.removesuffix(".py").replace("/", ".")
    return f"{module}.{test.dotted}"


def _dotted_from_module(test: TestId) -> str:
    """`test_x.Class.test_y`: its name in unittest when run from its folder."""
    return _dotted(test).removeprefix(test.file.rpartition("/")[0].replace("/", ".") + ".")
