"""The files beside the log of a rank: its looks at replicas, and samples of the results of its calls."""

from __future__ import annotations

import json
from pathlib import Path

from torch_testing_ext._collectives.findings.diverged_replicas import Look


def looks_beside(log: Path) -> Path:
    """The file of the looks of a rank with this log."""
    return log.with_name(f"{log.name}.replicas")


def looks_of(log: Path) -> list[Look]:
    """The looks that a rank has written, as far as they are complete."""
    try:
        lines = looks_beside(log).read_text("utf-8").splitlines(keepends=True)
    except OSError:
        return []
    return [Look(*json.loads(line)) for line in lines if line.endswith("\n")]


def results_beside(log: Path) -> Path:
    """The file of the results of a rank with this log: samples of what its calls have got and given."""
    return log.with_name(f"{log.name}.results")
