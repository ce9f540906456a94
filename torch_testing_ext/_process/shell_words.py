"""Words of commands that a user copies into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from .words import in_bytes


def quote(word: str) -> str:
    """A word as a shell reads it; one line of printable characters, whatever is in it.

    Bytes that are no text, and control characters, take the form `$'...'`, which bash, ksh and zsh know.
    """
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(map(_escape, word))
    return f"$'{escaped}'"


def _escape(letter: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    encoded = in_bytes(letter)
    return "".join(f"\\x{byte:02x}" for byte in encoded)


def join(words: Iterable[str]) -> str:
    return " ".join(map(quote, words))


def test_as_argument(test: str) -> str:
    """The name of a file or test as an argument: one that begins with a dash is not an option."""
    if test.startswith("-"):
        test = f"./{test}"
    return quote(test)
