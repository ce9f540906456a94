"""Persistent ranks: they run one task after another until they are dismissed.

Tasks reach each rank through a named pipe; a common pipe shows the parent which rank has finished which task. How a
task ended is in an account file, as for any rank: the pipe only wakes the parent. Answers to another task than the
current one are ignored. If a task goes wrong, all ranks are ended, because the state that they share is in doubt.
"""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.records.raw_records import do_members_agree, unpack_record
from torch_testing_ext._process import messages
from torch_testing_ext._process.fork_host import Exit
from torch_testing_ext._process.logs import read_ends
from torch_testing_ext.launch import start
from torch_testing_ext.launch.accounts import RankAccount, RankEnding, now, read_account
from torch_testing_ext.launch.jobs import Job, Sanitize
from torch_testing_ext.launch.tasks_of_ranks import (
    TO_PARENT,
    NoMoreTasks,
    RunTask,
    account_of_task,
    log_of_task,
    pipe_in,
    tasks_pipe,
)
from torch_testing_ext.launch.verdict import Expected
from torch_testing_ext.launch.watching.evidence import RankEvidence
from torch_testing_ext.launch.watching.rank_records import RankRecords, logs_of
from torch_testing_ext.launch.watching.run_watcher import RankWatcher, watch

_CHUNK = 1 << 14


class PersistentRanks:
    """The ranks of `job`, whose body iterates over its `tasks`. Raises CannotStart.

    With `inherited`, an object that they get in their contexts, they are forked off this process as it is now.
    """

    def __init__(self, job: Job, inherited: Any = None):
        self.directory = job.directory
        # The sanitizer begins and ends with each task.
        job = replace(job, sanitize=Sanitize())
        if inherited is None:
            self.run = start.launch(job)
        else:
            self.run = start.launch_from_here(job, inherited)
        self.sanitize = Sanitize()
        # Also open for reading: so opening does not wait for the rank, and writing to one that is gone does not raise.
        both_ways = os.O_RDWR | os.O_CLOEXEC
        self._pipes = [os.open(tasks_pipe(self.directory, rank), both_ways) for rank in self._ranks()]
        self._done_pipe = os.open(pipe_in(self.directory, "done"), both_ways | os.O_NONBLOCK)
        self._answers = messages.LineBuffer()
        # The ranks that have reported the current task as done.
        self.done: set[int] = set()
        self.run.server.loop.listen(self._done_pipe, self._receive)
        self.number = 0
        # The latest task.
        self.last = ""
        self.is_busy = False
        self.is_over = False

    def _ranks(self) -> range:
        return range(self.run.job.world_size)

    def is_complete(self) -> bool:
        """Whether all ranks are still running."""
        while self.run.wait_for_event(until=now()):
            pass
        return not self.run.lost and len(self.run.alive) == len(self._ranks())

    def start(self, task: str, sanitize: Sanitize | None = None) -> Path:
        """Have all ranks begin a task. Returns the path prefix of its files."""
        # Answers to the previous task.
        self._receive()
        self.sanitize = sanitize or Sanitize()
        self.number += 1
        self.last = task
        self.is_busy = True
        self.done.clear()
        self._began = now()
        self._written = [_size(self.run.job.log(rank)) for rank in self._ranks()]
        self._send(RunTask(self.number, task, self.sanitize))
        return self.directory / f"task{self.number}"

    def output(self, rank: int) -> str:
        """Return the text that a rank has printed since the current task began, or the latest one."""
        return read_ends(self.run.job.log(rank), self._written[rank])

    def _send(self, message: RunTask | NoMoreTasks) -> None:
        for pipe in self._pipes:
            os.write(pipe, messages.to_line(message))

    def watch(
        self, timeout: float | None, expected: Expected | None = None, endless: float | None = None
    ) -> RankEvidence:
        """Watch the current task until it ends. If it goes wrong, the ranks are ended too.

        `endless`: see `RankWatcher`.
        """
        watcher = _TaskWatcher(self, expected or Expected(), timeout, endless)
        went_well = False
        try:
            watcher.wait()
            watcher.ask_ranks_that_run()
            went_well = not watcher.pending and watcher.agreed() and watcher.are_in_step()
        finally:
            self.is_busy = False
            if not went_well or not self.is_complete():
                watcher.end_all()
                self._close()
        return watcher.evidence(self.sanitize.note)

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._done_pipe, _CHUNK):
                for line in self._answers.add(data):
                    answer = messages.from_json(line, TO_PARENT)
                    if answer.number == self.number:
                        self.done.add(answer.rank)

    def dismiss(self, timeout: float) -> RankEvidence:
        """Have all ranks exit, and end those that do not within `timeout` seconds."""
        self._send(NoMoreTasks())
        try:
            return watch(self.run, now() - self.run.began + timeout, Expected())
        finally:
            self._close()

    def end(self) -> None:
        if not self.is_over:
            RankWatcher(self.run, Expected(), self.run.began).end_all()
            self._close()

    def _close(self) -> None:
        start.finish(self.run)
        self.is_over = True
        self.run.server.loop.forget(self._done_pipe)
        for fd in (*self._pipes, self._done_pipe):
            os.close(fd)


class _TaskWatcher(RankWatcher):
    """Watches one task: a rank is done when it has reported so or exited."""

    def __init__(self, ranks: PersistentRanks, expected: Expected, timeout: float | None, endless: float | None):
        super().__init__(ranks.run, expected, ranks._began, timeout, endless, _TaskRecords(ranks))

    def take_stacks(self) -> None:
        """Take those of all ranks: one that has finished the task may be the one that the others wait for."""
        self.run.dump(self.state.stacks_timeout)

    def agreed(self) -> bool:
        """Whether all ranks have passed, or all have skipped."""
        endings = {account and account.ending for account in self.records.accounts.values()}
        return endings in ({RankEnding.PASSED}, {RankEnding.SKIPPED})

    def are_in_step(self) -> bool:
        """Whether the ranks have issued the same. A collective that is left over would meet one of the next task."""
        left = [unpack_record(self.records.left(rank)) for rank in range(self.run.job.world_size)]
        if do_members_agree(left):
            return True
        from torch_testing_ext._collectives.findings.message_pairs import unpaired
        from torch_testing_ext._collectives.findings.mismatches import first_mismatch
        from torch_testing_ext._collectives.findings.uneven_calls import is_uneven

        records = [raw.record(rank) for rank, raw in enumerate(left) if raw is not None]
        return first_mismatch(records) is None and not is_uneven(records) and not unpaired(records)


class _TaskRecords(RankRecords):
    """The accounts of one task, and its ends: answers, or the exits of ranks."""

    def __init__(self, ranks: PersistentRanks):
        super().__init__(ranks.run, ranks._began)
        self._ranks = ranks
        paths = [log_of_task(ranks.directory, rank, ranks.number) for rank in ranks._ranks()]
        self.logs = logs_of(paths, ranks.sanitize)

    def take_new(self) -> list[int]:
        new = []
        for rank in sorted(self._ranks.done - self.accounts.keys()):
            account = self._account_of_task(rank)
            if account is not None:
                self.accounts[rank] = account
                self.answers[rank] = Exit(account.code << 8, account.ended)
                new.append(rank)
        return new + super().take_new()

    def read_account(self, rank: int) -> RankAccount | None:
        """The task's account, or the rank's own if it exited before its first task."""
        return self._account_of_task(rank) or super().read_account(rank)

    def _account_of_task(self, rank: int) -> RankAccount | None:
        return read_account(account_of_task(self._ranks.directory, rank, self._ranks.number))

    def log_start(self, rank: int) -> int:
        return self._ranks._written[rank]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
