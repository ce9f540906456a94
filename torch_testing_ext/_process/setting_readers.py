"""Readers: each converts the text of a setting to its value; the message of a ValueError says what is valid."""

import enum
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The words for true and false, as INI files have them.
_TRUE = ("1", "yes", "true", "on")
_FALSE = ("0", "no", "false", "off")


def read_boolean(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"{text!r} is not true or false")
    return word in _TRUE


def whole_number(least: int) -> Callable[[str], int]:
    """A reader for whole numbers."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


count, count_or_zero = whole_number(1), whole_number(0)


def read_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a positive number of seconds")
    return value


def read_path(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    # As a shell: `~name` stays if there is no such user.
    return Path(os.path.expanduser(text))


def one_of(kind: type[enum.Enum]) -> Callable[[str], Any]:
    """A reader for the values of an enum."""

    def read(text: str) -> Any:
        known = [member.value for member in kind]
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return kind(text)

    return read
