"""The tasks of persistent ranks, as a rank gets and runs them, and their files."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import messages
from torch_testing_ext.launch import rank_collectives
from torch_testing_ext.launch.account_writer import AccountWriter
from torch_testing_ext.launch.accounts import AccountFile
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


_TO_RANK = messages.by_name(RunTask | NoMoreTasks)
TO_PARENT = messages.by_name(TaskDone)


def pipe_in(directory: Path, name: str) -> Path:
    """A named pipe, made by the parent or a rank, whichever needs it first."""
    path = directory / name
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return path


def tasks_pipe(directory: Path, rank: int) -> Path:
    return pipe_in(directory, f"rank{rank}.tasks")


def account_of_task(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank{rank}.account{number}"


def log_of_task(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank{rank}.sanitizer{number}"


@dataclass
class Task:
    """A task that all ranks run. `account` records how it ended; `path`, the same in all ranks, is for its files."""

    name: str
    account: AccountWriter
    path: Path


def tasks(directory: Path, rank: int) -> Iterator[Task]:
    """In a rank: its tasks, one by one. Asking for the next reports that the previous one is done."""
    done = os.open(pipe_in(directory, "done"), os.O_WRONLY | os.O_CLOEXEC)
    rank_collectives.begin_first_task()
    pid = os.getpid()
    with open(tasks_pipe(directory, rank), encoding="utf-8") as lines:
        for line in lines:
            task = messages.from_json(line, _TO_RANK)
            if isinstance(task, NoMoreTasks):
                return
            number = task.number
            file = AccountFile.open(account_of_task(directory, rank, number))
            writer = AccountWriter(file)
            try:
                rank_collectives.begin_sanitizing(rank, task.sanitize, log_of_task(directory, rank, number))
                yield Task(task.name, writer, directory / f"task{number}")
                if os.getpid() != pid:
                    # A child that the test has forked would read the tasks of this rank.
                    os._exit(1)
                with writer.own_errors():
                    rank_collectives.end_of_sanitizing()
                writer.attach(rank_collectives.collectives_of_test(more_follow=True))
            finally:
                file.close()
            # The test may have closed it; then its account says so.
            with suppress(OSError):
                os.write(done, messages.to_line(TaskDone(rank, number)))
            if writer.account is not None and writer.account.ending.is_failure:
                # Peers that wait in a collective see the lost connection.
                sys.exit(writer.account.code)
