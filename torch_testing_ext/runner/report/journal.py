"""The journal of a run: its events as they come, one line of JSON each.

A reporter writes it; `read_journal` makes the events again, from which all reports follow. The last line may be torn:
the run was killed while it was written. A run without a last event was interrupted: the tests without a result did
not finish.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch_testing_ext.runner import run_again
from torch_testing_ext.runner.events import (
    AttemptEnded,
    Collected,
    Output,
    RunBegan,
    StatusRequested,
    Stopping,
    TestBegan,
    TestFinished,
    TestIsSlow,
    UnitBegan,
    UnitEnded,
    WaitingForDevices,
    Warned,
)
from torch_testing_ext.runner.model import Policy, Summary
from torch_testing_ext.runner.options import Options

JOURNAL_FORMAT = "torch_testing_ext journal 5"
NAME = "journal.jsonl"
# Journals of earlier runs in a folder.
KEPT = 10


@dataclass(frozen=True)
class JournalHeader:
    """The first line: what reports need to know that is in no event."""

    format: str
    pid: int
    # Reruns a test whose name is appended.
    command: str
    policy: Policy
    allow_all_skipped: bool


@dataclass(frozen=True)
class JournalEnd:
    """The last line: the summary without its finished tests, which the lines before it have."""

    summary: Summary
    finished: int


def header_of(options: Options) -> JournalHeader:
    return JournalHeader(
        JOURNAL_FORMAT, os.getpid(), run_again.command(options), options.policy, options.allow_all_skipped
    )


_FOR_CONSOLE = (TestIsSlow, Output, StatusRequested, WaitingForDevices)
RECORDED = (
    *(Collected, RunBegan, UnitBegan, TestBegan, AttemptEnded, TestFinished, UnitEnded, Warned, Stopping),
    *_FOR_CONSOLE,
)
# What no report of a run that is over has, and what a reader of results can do without, too.
WHILE_RUNNING = (TestBegan, *_FOR_CONSOLE)
OF_UNITS = (UnitBegan, UnitEnded, *WHILE_RUNNING)
KINDS = {kind.__name__: kind for kind in (JournalHeader, *RECORDED, JournalEnd)}


class JournalError(Exception):
    """A journal that cannot be read; the message says why."""
