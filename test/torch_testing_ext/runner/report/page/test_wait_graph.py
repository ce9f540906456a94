"""The picture of ranks that wait for each other."""

import unittest

from torch_testing_ext._collectives.failure import RankWait
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.report.page.wait_graph import wait_graph

SITE = Site("/x/test_k.py", 30, "test_cycle")


class WaitGraphTest(unittest.TestCase):
    def drawn(self, *waits):
        """The texts of boxes and arrows, and the number of arrows."""
        (svg,) = wait_graph(waits)
        return [text.text for text in svg.iter("text")], len([*svg.iter("path")])

    def test_a_cycle(self):
        words, arrows = self.drawn(
            RankWait((0,), (1,), "all_reduce #1 of group dp", SITE), RankWait((1,), (0,), "recv #1 from rank 0", None)
        )
        self.assertEqual(words, ["all_reduce #1 of group dp, test_k.py:30", "recv #1 from rank 0", "rank 0", "rank 1"])
        self.assertEqual(arrows, 2)

    def test_folded_ranks_and_one_that_has_ended(self):
        words, arrows = self.drawn(RankWait((*range(5), *range(6, 64)), (5,), "all_reduce #2", SITE))
        self.assertEqual((words[1:], arrows), (["ranks 0-4, 6-63", "rank 5"], 1))
        even, odd = tuple(range(0, 64, 2)), tuple(range(1, 64, 2))
        words, arrows = self.drawn(RankWait(even, odd, "barrier #1", SITE))
        self.assertEqual((words[1:], arrows), (["ranks 0, 2, ..., 62", "ranks 1, 3, ..., 63"], 1))

    def test_several_that_one_waits_for(self):
        words, arrows = self.drawn(
            RankWait((0,), (1, 2), "all_reduce #1", SITE),
            RankWait((1,), (0,), "all_reduce #1 of group dp", SITE),
            RankWait((2,), (1,), "all_reduce #1 of group tp", SITE),
        )
        self.assertEqual((words[-3:], arrows), (["rank 0", "rank 1", "rank 2"], 4))

    def test_ranks_that_wait_alike_share_a_box(self):
        words, arrows = self.drawn(*(RankWait((rank,), (2,), "", SITE) for rank in (0, 1, 3)))
        self.assertEqual((words, arrows), (["test_k.py:30", "ranks 0, 1, 3", "rank 2"], 1))

    def test_no_waits(self):
        self.assertEqual(list(wait_graph(())), [])


if __name__ == "__main__":
    run_tests()
