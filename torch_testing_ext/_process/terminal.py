"""The terminal in front of which the user sits, for a debugger in a process that no longer has it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .words import in_bytes

TERMINAL_VARIABLE = "_TORCH_TESTING_EXT_TERMINAL"
# The name of the test takes the place of this in the value of TERMINAL_VARIABLE.
NAME_OF_TEST = "{test}"


def _of_stdin() -> str:
    try:
        return os.ttyname(0)
    except OSError:
        return ""


# pytest's capture takes it away later.
_at_start = _of_stdin()


def to_variable(text: str) -> str:
    """A text as `os.environ` holds it: in UTF-8, in every locale."""
    return os.fsdecode(in_bytes(text))


def from_variable(value: str) -> str:
    """The text of a variable that `to_variable` has made."""
    return os.fsencode(value).decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class UserTerminal:
    """A terminal, or the reason why there is none."""

    path: str = ""
    why_not: str = ""
    # The user has asked for a debugger: it also looks at failures.
    is_chosen: bool = False
    # The rank that stops where its test begins.
    stop_in: int | None = None

    @classmethod
    def here(cls) -> UserTerminal:
        """The terminal of this process; `TERMINAL_VARIABLE` says what it is in the processes of a run."""
        text = os.environ.get(TERMINAL_VARIABLE)
        if text is not None:
            return cls.read(from_variable(text))
        if "PYTEST_XDIST_WORKER" in os.environ:
            return cls(why_not="the workers of pytest-xdist have no terminal: run pytest without -n")
        return cls(_at_start, "" if _at_start else "there is no terminal: run the test in one")

    @classmethod
    def read(cls, text: str) -> UserTerminal:
        """The value of the setting: `RANK:PATH`, where the rank may be missing, or why there is none."""
        rank, colon, path = text.partition(":")
        if not colon or not path.startswith("/"):
            return cls(why_not=text)
        return cls(path, is_chosen=True, stop_in=int(rank) if rank else None)

    def written(self) -> str:
        stop_in = "" if self.stop_in is None else self.stop_in
        return f"{stop_in}:{self.path}" if self.path else self.why_not

    def expects_stops(self, file: str | None) -> bool:
        """Whether a debugger is likely to stop ranks of a test in this file: then waits of theirs must have no end."""
        if not self.path or self.is_chosen or file is None:
            return bool(self.path) and self.is_chosen
        try:
            return b"breakpoint(" in Path(file).read_bytes()
        except OSError:
            return False
