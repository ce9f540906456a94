"""The file of the setting sweep.known: the hangs that a sweep may find."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._process.project_settings import read_toml
from torch_testing_ext._process.words import nearest
from torch_testing_ext.faults import KnownFailure, PlannedFault, fault_of_text


@dataclass(frozen=True)
class KnownFile:
    """The file of the setting sweep.known."""

    path: Path
    hangs: tuple[KnownFailure, ...]

    def __str__(self) -> str:
        return str(self.path)

    def strangers(self, tests: Iterable[str]) -> list[str]:
        """Say which of its tests are none of these."""
        names = list(tests)
        strange = dict.fromkeys(each.test for each in self.hangs if not any(map(each.is_of, names)))
        return [f"{self}: no test of this run is {name!r}, which is known to hang" for name in strange]


_OF_KNOWN = ("test", "fault", "reason")
_TABLE = re.compile(r"\s*\[\[\s*known\s*\]\]")


def read_known_hangs(file: Path) -> KnownFile:
    """The tables [[known]] of a file. Raises ValueError."""
    try:
        written = file.read_text(encoding="utf-8")
        content = read_toml(written)
    except (OSError, ValueError) as error:
        raise ValueError(f"sweep.known={file}: {error}") from None
    for name in content.keys() - {"known"}:
        raise ValueError(f"sweep.known={file}: {name} is not a table of this file. Write [[known]]")
    tables = content.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ValueError(f"sweep.known={file}: write [[known]], in double brackets, before each known hang")
    places = [f"line {n}" for n, line in enumerate(written.splitlines(), 1) if _TABLE.match(line)]
    if len(places) != len(tables):
        # They need not have lines of their own.
        places = [f"number {n}" for n in range(1, len(tables) + 1)]
    wheres = [f"sweep.known={file}, [[known]] {place}" for place in places]
    hangs = (_known_hang(where, table) for where, table in zip(wheres, tables, strict=True))
    return KnownFile(file, tuple(hangs))


def _known_hang(where: str, given: Mapping[str, Any]) -> KnownFailure:
    for name in given.keys() - set(_OF_KNOWN):
        raise ValueError(f"{where}: {name} is not one of {', '.join(_OF_KNOWN)}.{nearest(name, _OF_KNOWN)}")
    for name in _OF_KNOWN:
        if not isinstance(given.get(name), str) or not given[name].strip():
            raise ValueError(f"{where}: {name} is missing")
    try:
        return KnownFailure(_fault_at_point(given["fault"]), given["reason"].strip(), given["test"].strip())
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _fault_at_point(text: str) -> PlannedFault:
    fault = fault_of_text(text)
    if fault.rank is None or fault.at is None:
        raise ValueError(f"{text!r} has no rank and point, as kill(rank=1, at=call(2)) has")
    return fault
