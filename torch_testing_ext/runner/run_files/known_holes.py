"""The file of known holes: a test that need not run until a day, and why.

Each line has three columns, two blanks or more apart: the day, the test or the beginning of its id, the reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from .run_file import BadResults

_COLUMNS = re.compile(r"\s{2,}|\t")


@dataclass(frozen=True)
class KnownHole:
    """A line of the file."""

    until: date
    test: str
    why: str

    def is_of(self, test: str) -> bool:
        rest = test.removeprefix(self.test)
        return test.startswith(self.test) and (not rest or self.test.endswith("/") or rest.startswith(("/", "::", "[")))


def read_known_holes(path: Path) -> tuple[KnownHole, ...]:
    """The known holes of a file. Raises BadResults."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadResults(f"{path}: {error.strerror}") from None
    except ValueError:
        raise BadResults(f"{path} is not UTF-8") from None
    return tuple(_holes(path, text.splitlines()))


def _holes(path: Path, lines: Sequence[str]) -> list[KnownHole]:
    holes = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        columns = _COLUMNS.split(line.strip(), maxsplit=2)
        try:
            until, test, why = columns
            holes.append(KnownHole(date.fromisoformat(until), test, why))
        except ValueError:
            raise BadResults(f"{path}:{number}: not a day (2027-01-31), test and reason, two blanks apart") from None
    return holes
