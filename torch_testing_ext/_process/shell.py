"""Words of commands that a user copies into a shell."""

import os
import shlex
from collections.abc import Iterable


def quote(word: str) -> str:
    """A word as a shell reads it; one line of printable characters, whatever is in it.

    Bytes that are no text, and control characters, take the form `$'...'`, which bash, ksh and zsh know.
    """
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escape, word)) + "'"


def _escape(letter: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    return letter if letter.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def join(words: Iterable[str]) -> str:
    return " ".join(map(quote, words))


def name(test: str) -> str:
    """The name of a file or test as an argument: one that begins with a dash is not an option."""
    return quote(f"./{test}" if test.startswith("-") else test)
