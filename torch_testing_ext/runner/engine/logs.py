"""Reads the logs and stacks that the ranks of a test wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torch_testing_ext._process.logs import read_ends
from torch_testing_ext.launch import hang

from ..model import RankLog

_RANK = re.compile(r"rank(\d+)\.(log|stacks)$")


def rank_logs(directories: Iterable[Path]) -> tuple[RankLog, ...]:
    """The logs and stacks of each rank; if the test ran twice (to explain a hang), those of both runs together."""
    found: dict[int, dict[str, str]] = {}
    for directory in directories:
        for file in sorted(directory.rglob("rank*")):
            if match := _RANK.match(file.name):
                texts = found.setdefault(int(match[1]), {"log": "", "stacks": ""})
                texts[match[2]] += read_ends(file)
    return tuple(RankLog(rank, texts["log"], hang.tidy(texts["stacks"])) for rank, texts in sorted(found.items()))
