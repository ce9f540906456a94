"""A request for a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_testing_ext.runner.model import TestId
from torch_testing_ext.runner.options import Options

from .terminal_stream import LineWriter


@dataclass(frozen=True)
class ReportRequest:
    """A run that is about to begin, or one that is over: a report looks here whether it is wanted."""

    options: Options
    # The environment variables of the runner.
    environ: Mapping[str, str]
    # The command of the run.
    command: str
    # Takes whole lines, and shows them above what a terminal redraws.
    console: LineWriter
    # Shows a warning, which changes neither outcome nor exit code.
    warn: Callable[[str], None]
    # Whether the run is over, and `torchtest report` makes its files again.
    is_over: bool = False
    # How the console shows the run.
    coloured: bool = False
    columns: int | None = None
    # What is new of tests since an earlier run, in words.
    changes: Mapping[TestId, str] = field(default_factory=dict)
