"""What a unit's processes wrote: read with bearable length, the beginning and the end of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from torch_testing_ext.launch import hang

from ..model import RankLog

LONGEST = 64 * 1024

_RANK = re.compile(r"rank(\d+)\.(log|stacks)$")


def read_ends(path: Path, start: int = 0, end: int | None = None, longest: int = LONGEST) -> str:
    """A part of a file; of a long part the beginning and the end, with a word on what is between."""
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size if end is None else end
            if end - start <= longest:
                return _text(file, start, end)
            half = longest // 2
            return (
                f"{_text(file, start, start + half)}\n"
                f"... {end - start - 2 * half} bytes cut here ...\n"
                f"{_text(file, end - half, end)}"
            )
    except OSError:
        return ""


def _text(file: BinaryIO, start: int, end: int) -> str:
    file.seek(start)
    return file.read(end - start).decode("utf-8", errors="replace")


def rank_logs(directories: Iterable[Path]) -> tuple[RankLog, ...]:
    """What the ranks of a test left; where it ran twice (to explain a hang), both times in one."""
    found: dict[int, dict[str, str]] = {}
    for directory in directories:
        for file in sorted(directory.rglob("rank*")):
            if match := _RANK.match(file.name):
                texts = found.setdefault(int(match[1]), {"log": "", "stacks": ""})
                texts[match[2]] += read_ends(file)
    return tuple(RankLog(rank, texts["log"], hang.tidy(texts["stacks"])) for rank, texts in sorted(found.items()))
