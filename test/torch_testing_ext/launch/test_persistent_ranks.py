"""Tests persistent ranks: tasks and answers, without a test framework."""

from __future__ import annotations

import os
import signal
import threading
import time
import unittest
from pathlib import Path

from kit.leftovers import nothing_left
from kit.processes import heed_ctrl_c, wait_until_gone

from torch_testing_ext import launch
from torch_testing_ext._process.messages import to_line
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import RankEnding, now, persistent_ranks, tasks_of_ranks
from torch_testing_ext.launch.watching.evidence import RankEvidence

WORLD_SIZE = 2


def setUpModule() -> None:
    heed_ctrl_c()


def run_tasks(context: launch.RankContext) -> None:
    """Run tasks named after a function here: `fail` on all ranks, or `fail of 1` on rank 1 alone."""
    rank = context.rank
    for task in tasks_of_ranks.tasks(context.directory, rank):
        function, _, only = task.name.partition(" of ")
        if not only or int(only) == rank:
            globals()[function](rank, task)
        if task.account.account is None:
            task.account.passed()


def write_pid(rank: int, task: tasks_of_ranks.Task) -> None:
    Path(f"{task.path}.{rank}").write_text(str(os.getpid()))


def fail(rank: int, task: tasks_of_ranks.Task) -> None:
    task.account.failed(AssertionError("as requested"), assertion=True)


def skip(rank: int, task: tasks_of_ranks.Task) -> None:
    task.account.skipped("not today", 86)


def die(rank: int, task: tasks_of_ranks.Task) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def close_all_descriptors(rank: int, task: tasks_of_ranks.Task) -> None:
    os.closerange(3, 4096)


def wait_for_ever(rank: int, task: tasks_of_ranks.Task) -> None:
    write_pid(rank, task)
    threading.Event().wait()


def interrupt_the_parent(rank: int, task: tasks_of_ranks.Task) -> None:
    os.kill(int(os.environ["PARENT"]), signal.SIGINT)
    threading.Event().wait()


def stop_itself(rank: int, task: tasks_of_ranks.Task) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def until_there(file: Path) -> None:
    while not file.exists():
        threading.Event().wait(0.005)


class PersistentRanksTest(unittest.TestCase):
    def setUp(self) -> None:
        self.ranks = self.make()

    def make(self) -> persistent_ranks.PersistentRanks:
        directory = launch.new_directory("persistent")
        job = launch.Job(
            body=launch.Named.of(run_tasks),
            world_size=WORLD_SIZE,
            directory=directory,
            context=launch.ProcessContext.here({"PARENT": str(os.getpid())}),
        )
        made = persistent_ranks.PersistentRanks(job)
        self.addCleanup(made.end)
        return made

    def do(self, task: str, seconds: float | None = 60.0) -> RankEvidence:
        self.path = self.ranks.start(task)
        return self.ranks.watch(seconds)

    def endings(self, task: str, seconds: float | None = 60.0) -> list[RankEnding]:
        return [report.ending for report in self.do(task, seconds).reports]

    def watch_briefly(self) -> RankEvidence:
        """Watch with a short time-out that begins when rank 0 has finished: how long that takes is not known."""
        while 0 not in self.ranks.done:
            self.ranks.run.wait_for_event()
        return self.ranks.watch(now() - self.ranks._began + 0.2)

    def test_one_task_after_another(self) -> None:
        pids = []
        for _ in range(3):
            self.assertEqual(self.endings("write_pid"), [RankEnding.PASSED] * 2)
            pids.append([Path(f"{self.path}.{rank}").read_text() for rank in range(WORLD_SIZE)])
        self.assertEqual(pids, [pids[0]] * 3)
        self.assertEqual(tuple(int(pid) for pid in pids[0]), self.ranks.run.pids)

    def test_all_skip(self) -> None:
        self.assertEqual(self.endings("skip"), [RankEnding.SKIPPED] * 2)
        self.assertFalse(self.ranks.is_over)

    def test_one_fails(self) -> None:
        pids = self.ranks.run.pids
        self.assertEqual(self.endings("fail of 1"), [RankEnding.PASSED, RankEnding.FAILED])
        self.assertTrue(self.ranks.is_over)
        self.assertEqual(wait_until_gone(pids, 5), [])

    def test_one_dies(self) -> None:
        end = self.do("die of 0")
        self.assertEqual([report.ending for report in end.reports], [RankEnding.KILLED, RankEnding.PASSED])
        self.assertEqual(end.reports[0].code, -signal.SIGKILL)
        self.assertFalse(end.timed_out)
        self.assertTrue(self.ranks.is_over)

    def test_one_closes_all_descriptors(self) -> None:
        """Among them those over which it gets its tasks and writes its account."""
        end = self.do("close_all_descriptors of 1")
        self.assertEqual([report.ending for report in end.reports], [RankEnding.PASSED, RankEnding.ERROR])
        self.assertIn("the test closed file descriptors of its process", end.reports[1].summary)
        self.assertTrue(self.ranks.is_over)

    def test_one_waits_for_ever(self) -> None:
        path = self.ranks.start("wait_for_ever of 1")
        until_there(Path(f"{path}.1"))
        end = self.watch_briefly()
        self.assertTrue(end.timed_out)
        self.assertEqual([report.ending for report in end.reports], [RankEnding.PASSED, RankEnding.STOPPED])
        self.assertRegex(end.reports[1].stacks, "in wait_for_ever")
        self.assertTrue(self.ranks.is_over)

    def test_one_is_stopped(self) -> None:
        """As a debugger or a user would stop it."""
        self.ranks.start("stop_itself of 1")
        self.assertEqual(
            [report.ending for report in self.watch_briefly().reports], [RankEnding.PASSED, RankEnding.STOPPED]
        )

    def test_an_answer_to_another_task_is_ignored(self) -> None:
        self.do("write_pid")
        self.ranks.start("wait_for_ever of 1")
        for number in (self.ranks.number - 1, self.ranks.number + 1):
            with open(self.ranks.directory / "done", "wb", buffering=0) as pipe:
                pipe.write(to_line(tasks_of_ranks.TaskDone(1, number)))
        self.assertEqual(
            [report.ending for report in self.watch_briefly().reports], [RankEnding.PASSED, RankEnding.STOPPED]
        )

    def test_an_answer_without_an_account_is_ignored(self) -> None:
        self.ranks.start("wait_for_ever of 1")
        with open(self.ranks.directory / "done", "wb", buffering=0) as pipe:
            pipe.write(to_line(tasks_of_ranks.TaskDone(1, self.ranks.number)))
        self.assertEqual(
            [report.ending for report in self.watch_briefly().reports], [RankEnding.PASSED, RankEnding.STOPPED]
        )

    def test_a_death_between_tasks_is_noticed(self) -> None:
        self.do("write_pid")
        self.assertTrue(self.ranks.is_complete())
        os.kill(self.ranks.run.pids[1], signal.SIGKILL)
        wait_until_gone([self.ranks.run.pids[1]], 5)
        while self.ranks.is_complete():  # the server may not have noticed it yet
            self.ranks.run.wait_for_event(time.monotonic() + 5)
        end = self.ranks.dismiss(5)
        self.assertEqual([report.ending for report in end.reports], [RankEnding.PASSED, RankEnding.KILLED])

    def test_dismissed(self) -> None:
        self.do("write_pid")
        end = self.ranks.dismiss(5)
        self.assertEqual([report.ending for report in end.reports], [RankEnding.PASSED] * 2)
        self.assertFalse(end.timed_out)
        self.assertEqual(wait_until_gone(self.ranks.run.pids, 5), [])

    def test_dismissed_in_the_middle_of_a_task(self) -> None:
        self.ranks.start("wait_for_ever of 1")
        self.ranks._send(tasks_of_ranks.NoMoreTasks())
        while 0 not in self.ranks.run.exits:
            self.ranks.run.wait_for_event()
        end = self.ranks.dismiss(0.0)
        self.assertEqual([report.ending for report in end.reports], [RankEnding.PASSED, RankEnding.STOPPED])

    def test_interrupted(self) -> None:
        """Ctrl-C leaves no rank."""
        self.ranks.start("interrupt_the_parent of 1")
        with self.assertRaises(KeyboardInterrupt):
            self.ranks.watch(60)
        self.assertTrue(self.ranks.is_over)
        self.assertEqual(wait_until_gone(self.ranks.run.pids, 5), [])

    def test_nothing_is_left(self) -> None:
        self.ranks.dismiss(5)
        for task in ("write_pid", "fail of 1", "die of 0"):
            with self.subTest(task=task), nothing_left(self):
                self.ranks = self.make()
                self.do(task)
                if not self.ranks.is_over:
                    self.ranks.dismiss(5)
                for file in sorted(self.ranks.directory.iterdir()):
                    file.unlink()
                self.ranks.directory.rmdir()


if __name__ == "__main__":
    run_tests()
