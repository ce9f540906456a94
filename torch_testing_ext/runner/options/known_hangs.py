"""The file of --drill-known: the hangs that a drill may find."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_testing_ext._process.project_settings import read_toml
from torch_testing_ext._process.words import nearest
from torch_testing_ext.faults import KnownHang, fault_of_text

from .values import UsageError

_OF_KNOWN = ("test", "fault", "reason")
_TABLE = re.compile(r"\s*\[\[\s*known\s*\]\]")


def read_known_hangs(file: Path) -> tuple[KnownHang, ...]:
    """The tables [[known]] of a file. Raises UsageError."""
    try:
        written = file.read_text(encoding="utf-8")
        content = read_toml(written)
    except (OSError, ValueError) as error:
        raise UsageError(f"--drill-known {file}: {error}") from None
    for name in content.keys() - {"known"}:
        raise UsageError(f"--drill-known {file}: {name} is not a table of this file. Write [[known]]")
    tables = content.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise UsageError(f"--drill-known {file}: write [[known]], in double brackets, before each known hang")
    places = [f"line {n}" for n, line in enumerate(written.splitlines(), 1) if _TABLE.match(line)]
    if len(places) != len(tables):
        # They need not have lines of their own.
        places = [f"number {n}" for n in range(1, len(tables) + 1)]
    wheres = [f"--drill-known {file}, [[known]] {place}" for place in places]
    return tuple(_known_hang(where, table) for where, table in zip(wheres, tables, strict=True))


def _known_hang(where: str, given: Mapping[str, Any]) -> KnownHang:
    for name in given.keys() - set(_OF_KNOWN):
        raise UsageError(f"{where}: {name} is not one of {', '.join(_OF_KNOWN)}.{nearest(name, _OF_KNOWN)}")
    for name in _OF_KNOWN:
        if not isinstance(given.get(name), str) or not given[name].strip():
            raise UsageError(f"{where}: {name} is missing")
    try:
        return KnownHang(given["test"].strip(), fault_of_text(given["fault"]), given["reason"].strip())
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
