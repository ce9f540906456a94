"""The messages between a persistent rank and its parent, and the files that they share."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import messages
from torch_testing_ext.launch.jobs import Sanitize


@dataclass(frozen=True)
class RunTask:
    """The next task of a rank."""

    number: int
    name: str
    sanitize: Sanitize


@dataclass(frozen=True)
class NoMoreTasks:
    """The rank is to exit."""


@dataclass(frozen=True)
class TaskDone:
    """The answer of a rank, short enough to be written into the common pipe atomically."""

    rank: int
    number: int


TO_RANK = messages.by_name(RunTask | NoMoreTasks)
TO_PARENT = messages.by_name(TaskDone)


def named_pipe(directory: Path, name: str) -> Path:
    """A named pipe, made by the parent or a rank, whichever needs it first."""
    path = directory / name
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return path


def tasks_pipe(directory: Path, rank: int) -> Path:
    return named_pipe(directory, f"rank{rank}.tasks")


def account_file(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank{rank}.account{number}"


def log_file(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank{rank}.sanitizer{number}"
