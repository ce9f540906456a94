"""Tests real hangs of ranks: which one differs, where each is, and the report of a second run under DETAIL."""

import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
from kit.leftovers import nothing_left
from kit.outcomes import outcome_of
from kit.ranks import FourRanks
from kit.settings import timeout

from torch_testing_ext.common_distributed import collectives_may_differ
from torch_testing_ext.common_utils import TestCase, run_tests

# The ranks hang forever; this is only how long the parent waits.
LIMIT = 4.0


def _deadlock_in_c():
    """Lock a mutex twice. PyDLL, unlike CDLL, keeps the GIL; and unlike a sleep() no signal interrupts this."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


class Hangs(FourRanks):
    def warm(self):
        self.join_group()

    def kind_differs(self):
        self.join_group()
        dist.all_reduce(torch.ones(4))
        if self.rank == 2:
            dist.all_gather([torch.empty(4) for _ in range(4)], torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4))

    @collectives_may_differ("tests the report of a time-out")
    def kind_may_differ(self):
        self.kind_differs()

    def shape_differs(self):
        self.join_group()
        dist.all_reduce(torch.ones(6 if self.rank == 1 else 4))
        dist.barrier()

    def one_never_comes(self):
        self.join_group()
        dist.all_reduce(torch.ones(4))
        if self.rank == 3:
            time.sleep(1000)
        dist.all_reduce(torch.ones(4))

    def one_holds_the_gil(self):
        self.join_group()
        dist.all_reduce(torch.ones(4))
        if self.rank == 3:
            _deadlock_in_c()
        dist.all_reduce(torch.ones(4))

    def two_do_not_answer(self):
        """One is stopped. The other keeps the GIL, and goes on at the request for its stacks."""
        self.join_group()
        dist.all_reduce(torch.ones(4))
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.rank == 3:
            ctypes.PyDLL(None).sleep(1000)
        dist.all_reduce(torch.ones(4))

    def one_is_stopped(self):
        self.join_group()
        if self.rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    def all_sleep(self):
        time.sleep(1000)

    def has_another_thread(self):
        import threading

        threading.Thread(target=time.sleep, args=(1000,), name="helper of the test").start()
        time.sleep(1000)


class HangTest(TestCase):
    @classmethod
    def setUpClass(cls):
        outcome_of(Hangs("warm"))

    def run_and_see(self, outcome, method, *parts, limit=LIMIT):
        with nothing_left(self), timeout(limit):
            seen = outcome_of(Hangs(method))
        self.assertEqual(seen.outcome, outcome, seen.message)
        for part in parts:
            self.assertIn(part, seen.message)
        return seen.message

    def hang(self, method, *parts):
        return self.run_and_see("error", method, "timed out after", f"(Hangs.{method}, ", *parts)

    def mismatch(self, method, *parts):
        """A mismatch ends the test: it would take an hour to reach the time-out."""
        return self.run_and_see("failed", method, *parts, limit=3600.0)

    def test_kind_mismatch(self):
        self.mismatch(
            "kind_differs",
            "ranks disagree in call #2 of the default group (ranks 0-3): "
            "rank 2 calls all_gather [4] float32, ranks 0, 1, 3 call all_reduce [4] float32",
            "where the running ranks are:",
            "in kind_differs (dist.all_reduce(torch.ones(4)))",
        )

    def test_mismatch_on_purpose(self):
        self.hang(
            "kind_may_differ",
            "=> ranks disagree in call #2 of the default group (ranks 0-3): "
            "rank 2 calls all_gather [4] float32, ranks 0, 1, 3 call all_reduce [4] float32",
            "last collective: all_gather #2 [4]",
            "in kind_differs (dist.all_reduce(torch.ones(4)))",
        )

    def test_shape_mismatch(self):
        # The others have continued to the barrier: the cause is an earlier collective.
        self.mismatch(
            "shape_differs",
            "in call #1 of the default group",
            "rank 1 calls all_reduce [6] float32, ranks 0, 2, 3 call all_reduce [4] float32",
        )

    def test_missing_rank(self):
        message = self.hang("one_never_comes", "=> rank 3 never reached all_reduce #2", "(time.sleep(1000))")
        self.assertIn("rank 3 never reached all_reduce #2", message.partition("; timed out")[0])

    def test_rank_in_c_with_the_gil(self):
        message = self.hang(
            "one_holds_the_gil",
            "in _deadlock_in_c (libc.pthread_mutex_lock(mutex))",
            "rank 3's stacks",
        )
        # It cannot send its flight recorder, so nothing is claimed about its collectives.
        self.assertIn("its collectives are not known (it did not answer)", message)
        self.assertIn("rank 3 of 4 gave no answer; ranks 0-2 are waiting for it in all_reduce #2", message)

    def test_a_rank_that_is_stopped(self):
        """It goes on when the test ends the ranks, and so do all others."""
        self.hang("one_is_stopped", "rank 3 of 4 was stopped, as by SIGSTOP; ranks 0-2 are waiting for it in")

    def test_ranks_that_go_on_when_their_stacks_are_taken(self):
        self.hang(
            "two_do_not_answer",
            "rank 1 of 4 was stopped, as by SIGSTOP; rank 3 of 4 gave no answer; ranks 0, 2 are waiting for them in "
            "all_reduce #2",
            "where the running ranks are:",
        )

    def test_no_collective_at_all(self):
        self.hang("all_sleep", "; all 4 ranks still running\n", "where the running ranks are:", "no collective yet")

    def test_all_threads_are_shown(self):
        message = self.hang("has_another_thread")
        # Their stacks are alike: one of them stands for all.
        self.assertIn("ranks 0-3 wait in the same place; rank 0's stacks", message)
        self.assertEqual(message.count("hread 0x"), 2)


if __name__ == "__main__":
    run_tests()
