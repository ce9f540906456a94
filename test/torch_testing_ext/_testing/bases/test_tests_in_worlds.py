"""Tests in ranks that run in a whole world: what is found at another size, what is not judged, what does not run."""

import os
import unittest
import unittest.mock
from pathlib import Path

import pytest
import world_tests_subject as subject
from kit.outcomes import outcome_of

from torch_testing_ext._collectives.worlds import world_views
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch.aspects.world import SIZE

LINES = Path(subject.__file__).read_text().splitlines()


def line_of(text):
    """Where the subject has a text for the first time, as messages name it."""
    number = next(number for number, line in enumerate(LINES, 1) if text in line)
    return f"world_tests_subject.py:{number}"


class TestsInWorldsTest(unittest.TestCase):
    def setUp(self):
        worlds = world_views.NotedWorlds()
        worlds.take()
        noted = unittest.mock.patch.object(world_views, "noted", worlds)
        noted.start()
        self.addCleanup(noted.stop)

    def run_in(self, size, cls, name):
        with unittest.mock.patch.dict(os.environ, {SIZE.name: str(size)}):
            return outcome_of(cls(name))

    def assertPasses(self, size, cls, name):
        self.assertEqual(self.run_in(size, cls, name), ("passed", ""))
        (world,) = world_views.noted.take()
        self.assertEqual(world.size, size)
        return world

    def assertFinds(self, size, name, *texts, outcome="failed"):
        seen = self.run_in(size, subject.FourRanks, name)
        self.assertEqual(seen.outcome, outcome, seen.message)
        for text in texts:
            self.assertIn(text, seen.message)

    def assertSkips(self, cls, name, reason):
        self.assertEqual(self.run_in(8, cls, name), ("skipped", reason))

    def test_sound_at_another_size(self):
        world = self.assertPasses(8, subject.FourRanks, "test_sound")
        places = [place.partition(" ")[0] for place in world.not_judged]
        texts = ("self.assertEqual(tensor", "torch.testing.assert_close", "# by its own name")
        self.assertEqual(places, list(map(line_of, texts)))
        self.assertEqual([alike.ranks for alike in world.classes], [tuple(range(8))])

    def test_a_hang_that_four_ranks_do_not_have(self):
        self.assertPasses(4, subject.FourRanks, "test_group_of_four")
        said = "ranks 4-7 left before barrier #1; ranks 0-3 are waiting in it"
        self.assertFinds(8, "test_group_of_four", said, line_of("# fault"), outcome="error")

    def test_a_ring_that_forgets_the_last(self):
        self.assertPasses(4, subject.FourRanks, "test_ring_that_forgets_the_last")
        said = "rank 3 left without sending; rank 4 is waiting in recv #1 from rank 3"
        self.assertFinds(5, "test_ring_that_forgets_the_last", said, outcome="error")

    def test_each_kind_of_class_is_judged(self):
        for cls in (subject.Continuous, subject.Threads):
            with self.subTest(cls.__name__):
                seen = self.run_in(2, cls, "test_hangs")
                self.assertEqual(seen.outcome, "error", seen.message)
                self.assertIn("rank 1 left before barrier #1; rank 0 is waiting in it", seen.message)
                seen = self.run_in(2, cls, "test_runs_nothing")
                self.assertEqual(seen.outcome, "error", seen.message)
                self.assertIn("test_runs_nothing ran nothing", seen.message)

    def test_an_uneven_split(self):
        self.assertPasses(4, subject.FourRanks, "test_uneven")
        self.assertFinds(5, "test_uneven", "ranks 0, 1 call all_gather_into_tensor [3] float32")

    @pytest.mark.slow
    def test_other_classes(self):
        for cls, name in (
            (subject.Continuous, "test_sum"),
            (subject.Threads, "test_sum"),
            (subject.OnMesh, "test_gather"),
            (subject.Sharded, "test_step"),
            (subject.Sharded, "test_step_on_cpu"),
            (subject.ShardedContinuous, "test_step"),
            (subject.OnAllDevices, "test_sum"),
        ):
            with self.subTest(cls.__name__, name=name):
                self.assertTrue(self.assertPasses(3, cls, name).not_judged)

    def test_a_size_of_its_own_gives_way(self):
        self.assertPasses(8, subject.ByItself, "test_size")

    def test_a_bare_assertion_ends_the_comparison(self):
        place = line_of("assert self.sum_of_ranks()")
        self.assertSkips(
            subject.FourRanks,
            "test_bare_assertion",
            f"not judged: compares communicated values at {place} in test_bare_assertion",
        )
        seen = self.run_in(8, subject.FourRanks, "test_assertion_on_one_rank")
        self.assertEqual(seen.outcome, "skipped", "the others wait only since the values are not known")

    def test_what_was_done_before_a_bare_assertion_counts(self):
        self.assertFinds(8, "test_mismatch_before_a_bare_assertion", "ranks 0-3 call all_reduce [4] float32")

    def test_an_assertion_on_own_values_is_judged(self):
        self.assertFinds(8, "test_own_values", "all 8 ranks failed", line_of("dist.get_world_size(), 4"))
        self.assertFinds(8, "test_own_values_by_name", "all 8 ranks failed", line_of("assert_close(torch.ones(2)"))

    def test_what_does_not_run(self):
        four = subject.FourRanks
        for cls, name, why in (
            (four, "test_fixed", f"fixes its world size to 2   {line_of('dist.init_process_group')} in init"),
            (four, "test_starts_a_process", "starts a process"),
            (four, "test_asks_nobody", "waits on rank 0 for 'unset' in a store, which no rank before it has set"),
            (four, "test_faults", "has faults"),
            (subject.OwnRanks, "test_sound", "starts or judges its ranks itself: OwnRanks"),
        ):
            with self.subTest(name):
                seen = self.run_in(8, cls, name)
                self.assertEqual(seen.outcome, "skipped", seen.message)
                self.assertIn(f"not in a world of 8 ranks: it {why}", seen.message)

    def test_devices_that_a_test_needs(self):
        self.assertSkips(subject.Sharded, "test_many_devices", "Need at least 1000 accelerator devices")

    def test_its_own_skip(self):
        self.assertSkips(subject.FourRanks, "test_skips", "not today")

    def test_the_class_stays_as_it_was(self):
        self.run_in(8, subject.FourRanks, "test_sound")
        self.assertEqual(subject.FourRanks("test_sound").world_size, 4)


if __name__ == "__main__":
    run_tests()
