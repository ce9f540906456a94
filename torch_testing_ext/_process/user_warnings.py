"""Warnings for the user from a process that runs tests: on stderr, and for the host of the tests to pass on."""

import sys
from contextlib import suppress
from typing import NamedTuple


class KitWarning(NamedTuple):
    """Something that the user should know although the test passes."""

    text: str
    # It may differ between processes, as by the names of threads.
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.text}, because {self.reason}" if self.reason else self.text


_pending: list[KitWarning] = []


def warn_user(text: str, reason: str = "") -> None:
    """Print a warning, and keep it for `take_warnings`."""
    _pending.append(KitWarning(text, reason))
    # A test may have closed or replaced it.
    with suppress(Exception):
        print(f"torch_testing_ext: {_pending[-1]}", file=sys.stderr, flush=True)


def take_warnings() -> tuple[KitWarning, ...]:
    """The warnings since the last call."""
    taken = tuple(_pending)
    _pending.clear()
    return taken
