"""Ranks that leave while a peer still creates a group that they have created already."""

import fcntl
import os
import tempfile
import threading
import unittest
from pathlib import Path

import pytest
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.processes import is_alive
from kit.ranks import Ranks, outcome_and_told, stays_true, wait_for

from torch_testing_ext._testing.bases import group_creation
from torch_testing_ext._testing.bases.group_creation import GroupCreation
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import AccountWriter, RankContext, read_account


class Things(Ranks):
    """Methods have names without `test`, so that no loader collects them.

    Rank 1 is slow: it creates the group for as long as rank 0 needs to skip or to end, and tells whether rank 0 lived.
    """

    @property
    def directory(self) -> Path:
        return Path(self.file_name).parent

    def create_slowly(self, name="a group") -> None:
        with group_creation._creating(name):
            if self.rank == 1:
                (self.directory / "pid").write_text(str(os.getpid()))
                wait_for(lambda: read_account(self.directory / "rank0.account") is not None)
                self.tell(self.peer_is_alive_for_a_while())
            else:
                (self.directory / "peer").write_text(str(os.getpid()))
                wait_for((self.directory / "pid").exists)

    def peer_is_alive_for_a_while(self) -> bool:
        peer = int((self.directory / "peer").read_text())
        return stays_true(lambda: is_alive(peer))  # a rank that does not wait exits much sooner after its account

    def all_skip(self) -> None:
        self.create_slowly()
        self.skipTest("all of them")

    def all_skip_by_code(self) -> None:
        self.create_slowly()
        raise SystemExit(76)

    def all_pass(self) -> None:
        self.create_slowly()

    def one_fails(self) -> None:
        self.join_group()
        if self.rank == 1:
            raise ConnectionError("Connection closed by peer")
        self.skipTest("the other")

    def one_dies(self) -> None:
        self.join_group()
        if self.rank == 1:
            os._exit(3)
        self.skipTest("the other")

    def one_skips(self) -> None:
        self.join_group()
        if self.rank == 1:
            self.skipTest("alone")

    def destroyed_and_created_again(self) -> None:
        for _ in range(3):
            self.join_group()
            dist.barrier()  # as in any process: whoever destroys a group at once may fail a peer that still connects
            dist.destroy_process_group()
            self.file_name += "again"
        self.skipTest("all of them")


class FourRanks(Things):
    world_size = 4

    def skips(self) -> None:
        self.join_group()
        self.skipTest("all of them")

    def skips_after_destroying(self) -> None:
        self.join_group()
        dist.barrier()
        dist.destroy_process_group()
        self.skipTest("all of them")

    def passes(self) -> None:
        self.join_group()


class InFull(FourRanks):
    fast_exit = False


@unittest.skipUnless(Path("/proc/self/stat").exists(), "reads the state of a process from /proc")
class TestSlowPeer(TestCase):
    def test_a_rank_that_leaves_waits(self):
        for method, outcome in (("all_skip", "skipped"), ("all_skip_by_code", "skipped"), ("all_pass", "passed")):
            with self.subTest(method=method):
                seen, told = outcome_and_told(Things(method))
                self.assertEqual((seen.outcome, told), (outcome, [True]), seen.message)


class TestOutcomes(TestCase):
    @pytest.mark.slow
    def test_all_skip(self):
        for kind in (FourRanks, InFull):
            for method in ("skips", "skips_after_destroying", "destroyed_and_created_again"):
                with self.subTest(kind=kind.__name__, method=method):
                    for _ in range(3):
                        self.assertEqual(outcome_of(kind(method)), ("skipped", "all of them"))

    @pytest.mark.slow
    def test_all_pass(self):
        for kind in (FourRanks, InFull):
            for _ in range(3):
                self.assertEqual(outcome_of(kind("passes")), ("passed", ""))

    def test_a_failure_beside_skips_counts(self):
        for method, message in (
            ("one_fails", "rank 1 of 2 raised .*ConnectionError"),
            ("one_dies", "rank 1 of 2 exited with code 3"),
            ("one_skips", "rank 1 skipped, rank 0 did not"),
        ):
            with self.subTest(method=method):
                seen = outcome_of(Things(method))
                self.assertIn(seen.outcome, ("failed", "error"))
                self.assertRegex(seen.message, message)


class TestWaiting(TestCase):
    """In this process and in children that hold locks."""

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.file = Path(directory.name, "creating")
        self.groups = GroupCreation(self.file, rank=0)

    def start_peer(self, name, times=1):
        """A child that creates a group until it is told to end, or dies."""
        (ready, started), (stop, end) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            peer = GroupCreation(self.file, rank=1)
            for _ in range(times - 1):
                with peer.creating(name):
                    pass
            with peer.creating(name):
                os.write(started, b"1")
                os.close(end)
                os.read(stop, 1)
            os._exit(0)
        os.close(stop)
        os.read(ready, 1)
        return pid, end

    def create(self, name):
        with self.groups.creating(name):
            pass

    def waits(self) -> bool:
        return any(not self.groups.is_complete(group) for group in self.groups.created)

    def test_for_the_groups_that_it_has_created(self):
        pid, end = self.start_peer("one")
        self.assertFalse(self.waits())
        self.create("another")
        self.assertFalse(self.waits())
        self.create("one")
        self.assertTrue(self.waits())
        os.close(end)
        self.groups.wait_for_peers()
        os.waitpid(pid, 0)
        self.assertFalse(self.waits())

    def test_not_for_the_next_group_of_the_same_name(self):
        pid, end = self.start_peer("one", times=2)
        self.create("one")
        self.assertFalse(self.waits())
        self.create("one")
        self.assertTrue(self.waits())
        os.close(end)
        os.waitpid(pid, 0)

    def test_creation_while_a_peer_looks(self):
        """A peer that looks whether anybody creates the group holds a lock of its range for a moment."""
        (ready, started), (stop, end) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(end)
            GroupCreation(self.file, rank=1).lock(
                fcntl.LOCK_SH, group_creation._range_of("one", 0), group_creation._MOST_RANKS
            )
            os.write(started, b"1")
            os.read(stop, 1)
            os._exit(0)
        os.close(stop)
        os.read(ready, 1)
        threading.Timer(0.1, os.close, (end,)).start()
        self.create("one")
        os.waitpid(pid, 0)
        self.assertEqual(len(self.groups.created), 1)

    def test_not_for_one_that_died(self):
        pid, _ = self.start_peer("one")
        self.create("one")
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        self.assertFalse(self.waits())

    def test_not_in_a_process_that_a_test_forked(self):
        """It has the rank's context, but may create the group with the rank itself."""
        context = RankContext(0, 2, self.file.parent, AccountWriter(None))
        context.group_creation = self.groups
        with context.entered(), group_creation._creating("one"):
            pid = os.fork()
            if pid == 0:
                with group_creation._creating("one"):
                    group_creation.wait_for_peers()
                os._exit(0)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
        self.assertEqual(len(self.groups.created), 1)

    def test_not_where_files_cannot_be_locked(self):
        self.groups = GroupCreation(Path("/nowhere/creating"), rank=0)
        self.create("one")
        self.groups.wait_for_peers()


if __name__ == "__main__":
    run_tests()
