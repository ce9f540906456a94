"""Properties across ranks: drawing, shrinking, reporting.

The suite finds each mutant and reports the smallest possible example.
"""

import contextlib
import io
import os
import signal
import time
from unittest import mock

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.control import current_build_context

from torch_testing_ext._hypothesis import example_watchdog, property_roles
from torch_testing_ext._hypothesis.example_watchdog import Watchdog
from torch_testing_ext._torch.groups import made_groups
from torch_testing_ext.common_distributed import MultiProcessTestCase, RankError, RankFailure
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.hypothesis_utils import (
    assume,
    data,
    device_meshes,
    example,
    given,
    note,
    partitions,
    per_rank,
    seed,
    settings,
    target,
)

PROFILE = settings(max_examples=60, database=None, derandomize=True)
NUMBERS = st.integers(0, 100)


def gathered(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def fails_with(*parts, error=RankFailure):
    """Expect the test to fail with a message that contains these parts."""

    def decorate(test):
        test.expected_error, test.expected_parts = error, parts
        return test

    return decorate


class Properties(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _join_processes(self, fn):
        parts = getattr(fn, "expected_parts", None)
        if parts is None:
            super()._join_processes(fn)
            return
        with self.assertRaises(fn.expected_error) as caught:
            super()._join_processes(fn)
        for part in parts:
            self.assertIn(part, f"{caught.exception}\n{caught.exception.account}")


class TestDrawing(Properties):
    @pytest.mark.slow
    @PROFILE
    @given(n=NUMBERS, mine=per_rank(NUMBERS))
    def test_all_ranks_have_the_same_value_and_a_share_of_their_own(self, n, mine):
        self.assertEqual(gathered(n), [n] * self.world_size)
        self.assertEqual(gathered(mine)[self.rank], mine)

    @PROFILE
    @given(data())
    def test_values_drawn_during_an_example_are_the_same(self, data):
        first = data.draw(NUMBERS)
        dist.barrier()
        second = data.draw(st.integers(0, first))
        self.assertEqual(gathered((first, second)), [(first, second)] * self.world_size)

    @PROFILE
    @given(mesh=device_meshes(), partition=partitions())
    def test_blueprints_are_built(self, mesh, partition):
        self.assertEqual(mesh.size(), self.world_size)
        total = torch.ones(1)
        dist.all_reduce(total, group=partition.mine)
        self.assertEqual(total.item(), len(partition.members))

    @PROFILE
    @given(n=NUMBERS)
    def test_one_rank_may_reject(self, n):
        if self.rank == 1:
            assume(n % 5 != 4)
        dist.barrier()
        self.assertNotEqual(n % 5, 4)

    @settings(PROFILE, deadline=None)
    @given(n=NUMBERS)
    def test_rank_0_may_run_out_of_data(self, n):
        """Hypothesis then ends the example, while the others wait for rank 0 in a collective."""
        if self.rank == 0 and n > 70:
            current_build_context().data.mark_overrun()
        dist.barrier()
        self.assertLessEqual(n, 70)

    @PROFILE
    @given(stay=st.booleans())
    def one_rank_may_leave(self, stay):
        assume(stay or self.rank != 1)
        dist.barrier()

    def test_one_rank_may_leave_before_rank_0_enters(self):
        def enter_late(watchdog, number, describe):
            until = time.monotonic() + 10
            while not describe().endswith("stay=True)") and watchdog.interrupted != number:
                self.assertLess(time.monotonic(), until, "the watchdog did not notice that rank 1 left")
            enter(watchdog, number, describe)

        enter = Watchdog.enter
        with mock.patch.object(Watchdog, "enter", enter_late if self.rank == 0 else enter):
            self.one_rank_may_leave()

    @PROFILE
    @example(n=7)
    @given(n=st.just(3))
    def test_example_runs_in_all_ranks(self, n):
        seen = self.__dict__.setdefault("seen", set())
        seen.add(n)
        self.assertIn(7, seen)
        self.assertEqual(gathered(n), [n] * self.world_size)

    @settings(max_examples=3, database=None, derandomize=True)
    @given(n=NUMBERS)
    def test_the_watchdog_of_each_rank_knows_the_example(self, n):
        mine = property_roles.Participant.current
        self.assertEqual(mine.watchdog.current, mine.number)

    @PROFILE
    @given(n=NUMBERS)
    def test_hypothesis_own_target_may_be_called_in_every_rank(self, n):
        hypothesis.target(float(n))

    @settings(max_examples=300, database=None, derandomize=True)
    @fails_with("rank 2: failed: AssertionError: high")
    @given(mine=per_rank(st.integers(0, 100_000)))
    def test_target_raises_the_score_of_any_rank(self, mine):
        if self.rank == 2:
            target(float(mine))
            if mine >= 99_000:
                self.fail("high")


class TestWatchdog(TestCase):
    def test_no_cut_while_a_group_is_created(self):
        """The other members would wait for this rank's connections for ever."""
        connections = mock.Mock()
        watchdog = Watchdog({}, is_leader=True, connections=connections, deadline=None)
        self.addCleanup(watchdog.close)
        watchdog.begin(1)
        watchdog.enter(1, str)
        with mock.patch.object(made_groups, "group_in_creation", lambda: "a group"):
            watchdog._interrupt(1)
            connections.cut.assert_not_called()
        watchdog._interrupt(1)
        connections.cut.assert_called()

    def test_a_slow_example_is_told_once(self):
        watchdog = Watchdog({}, is_leader=False, connections=mock.Mock(), deadline=None)
        watchdog.close()  # from here on, this thread looks at the times
        told = io.StringIO()
        watchdog.begin(1)
        with mock.patch.object(example_watchdog, "SLOW", -1.0), contextlib.redirect_stderr(told):
            watchdog._check_times()
            self.assertEqual(told.getvalue(), "")  # this rank is not in it yet
            watchdog.enter(1, lambda: "test_sum(n=3)")
            for _ in range(2):
                watchdog._check_times()
        self.assertEqual(told.getvalue(), "this example has been running for 0 s: test_sum(n=3)\n")


class TestShrinking(Properties):
    @PROFILE
    @fails_with(
        "rank 2 of 4 failed",
        "test_failure_before_a_collective_of_the_others(n=17, v={rank 0: 0, rank 1: 0, rank 2: 6, rank 3: 0})",
        "  rank 2: failed: AssertionError: too much\n  rank 0: was waiting for another rank\n",
        "rank 2: v is 6",
        "@reproduce_failure",
    )
    @given(n=NUMBERS, v=per_rank(NUMBERS))
    def test_failure_before_a_collective_of_the_others(self, n, v):
        note(f"v is {v}")
        dist.barrier()
        if self.rank == 2 and n > 16 and v > 5:
            self.fail("too much")
        dist.all_reduce(torch.ones(n))

    @PROFILE
    @fails_with("Draw 1: 0", "Draw 2: 8", "rank 0: failed: ValueError: more than 7")
    @given(data())
    def test_failure_between_draws(self, data):
        data.draw(NUMBERS)
        n = data.draw(NUMBERS)
        if self.rank == 0 and n > 7:
            raise ValueError("more than 7")
        dist.barrier()
        data.draw(NUMBERS)

    @settings(max_examples=40, database=None, derandomize=True, deadline=1000)
    @fails_with("(stay=False) hangs: ranks 0-2 of 4 waited")
    @given(stay=st.booleans())
    def test_hang_within_a_deadline(self, stay):
        """Every hang lasts until the deadline, so the example has little to shrink."""
        if self.rank == 3 and not stay:
            return
        dist.barrier()

    @PROFILE
    @fails_with(
        "rank 3 failed: AssertionError: too much; rank 1 could not be interrupted",
        "in this example: test_failure_while_another_rank_does_not_wait_on_the_network(n=",
        error=RankError,
    )
    @given(n=NUMBERS)
    def test_failure_while_another_rank_does_not_wait_on_the_network(self, n):
        property_roles.INTERRUPT_TIMEOUT = 2.0
        if self.rank == 3 and n > 16:
            self.fail("too much")
        if self.rank == 1 and n > 16:
            time.sleep(1000)
        dist.barrier()

    @PROFILE
    @fails_with("rank 3 of 4 was killed by SIGKILL", "rank 3 was lost in this example: test_death(n=", error=RankError)
    @given(n=NUMBERS)
    def test_death(self, n):
        if self.rank == 3 and n > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @PROFILE
    @fails_with("rank 0 of 4 was killed by SIGKILL", "rank 0 was lost in this example: test_death_of", error=RankError)
    @given(n=NUMBERS)
    def test_death_of_the_leader(self, n):
        if self.rank == 0 and n > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @PROFILE
    @fails_with("failed, and then did not fail when it was run again")
    @given(n=NUMBERS)
    def test_flaky_failure(self, n):
        self.runs = getattr(self, "runs", 0) + 1
        if self.rank == 1 and self.runs == 3:
            self.fail("once")

    @settings(max_examples=60, database=None, derandomize=False)
    @fails_with("To repeat these examples: put @hypothesis.seed(")
    @given(n=NUMBERS)
    def test_report_shows_the_seed(self, n):
        self.assertLess(n, 5)

    @settings(max_examples=60, database=None, derandomize=True)  # Hypothesis' default in CI
    @fails_with("To repeat these examples: run the test again.")
    @given(n=NUMBERS)
    def test_report_without_a_seed(self, n):
        self.assertLess(n, 5)

    @settings(max_examples=60, database=None, derandomize=False)
    @seed(17)
    @fails_with("@hypothesis.seed(17)")
    @given(n=NUMBERS)
    def test_report_shows_an_explicit_seed(self, n):
        self.assertLess(n, 5)


def shard_bounds(size, parts, index):
    each = -(-size // parts)
    return min(size, index * each), min(size, (index + 1) * each)


class TestMutants(Properties):
    @PROFILE
    @fails_with("(size=5) fails on rank")
    @given(size=st.integers(0, 40))
    def test_off_by_one_in_a_shard_boundary(self, size):
        """Rank 0 drops the last element of its shard if the shards are uneven and it has more than one element."""
        start, end = shard_bounds(size, self.world_size, self.rank)
        uneven = size % self.world_size and end - start > 1
        wrong_end = end - 1 if self.rank == 0 and uneven else end
        part = torch.arange(start, wrong_end)
        parts = gathered(part.tolist())
        self.assertEqual([number for part in parts for number in part], list(range(size)))

    @PROFILE
    @fails_with("(shift=2, values={", "fails on rank")
    @given(shift=st.integers(0, 3), values=per_rank(st.integers(0, 9)))
    def test_swapped_rank(self, shift, values):
        everyone = gathered(values)
        source = (self.rank + shift) % self.world_size if shift < 2 else (self.rank - shift - 1) % self.world_size
        self.assertEqual(everyone[source], everyone[(self.rank + shift) % self.world_size])

    @PROFILE
    @fails_with(
        ": test_a_long_example fails on ranks 0-3 of 4: ValueError: boom\n",
        "in the example: test_a_long_example(part=tensor([[",
    )
    @given(part=st.just(torch.zeros(2, 2)))
    def test_a_long_example(self, part):
        """The cause comes before an example of several lines."""
        raise ValueError("boom")

    @settings(max_examples=60, database=None, derandomize=True)
    @fails_with("(n=1, ask_async=True) fails on")
    @given(n=st.integers(0, 20), ask_async=st.booleans())
    def test_missing_wait(self, n, ask_async):
        """Rank 0 reads the tensor before rank 1 sends it."""
        received = torch.zeros(n)
        if self.rank == 0:
            work = dist.irecv(received, 1)
            if not ask_async:
                work.wait()
            seen = received.clone()
            dist.barrier()
            work.wait() if ask_async else None
            self.assertEqual(seen, torch.ones(n))
        else:
            if self.rank == 1 and not ask_async:
                dist.send(torch.ones(n), 0)
            dist.barrier()
            if self.rank == 1 and ask_async:
                dist.send(torch.ones(n), 0)


if __name__ == "__main__":
    run_tests()
