"""The picture of ranks that wait for each other, from the lines of accounts."""

import unittest

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.report.wait_graph import wait_graph

CYCLE = """rank 0 waits in group dp (all_reduce #1, line 30) for rank 1, which waits in group tp ... for rank 0
  rank 0: waiting for rank 1 in all_reduce #1 of group dp   test_k.py:30 in test_cycle
  rank 1: waiting for rank 0 in recv #1 from rank 0

where the running ranks are:
  rank 0: test_k.py:30 in test_cycle; last collective: all_reduce #1 [3]
"""


class WaitGraphTest(unittest.TestCase):
    def drawn(self, account):
        """The texts of boxes and arrows, and the number of arrows."""
        (svg,) = wait_graph(account)
        return [text.text for text in svg.iter("text")], len([*svg.iter("path")])

    def test_a_cycle(self):
        words, arrows = self.drawn(CYCLE)
        self.assertEqual(words, ["all_reduce #1 of group dp, test_k.py:30", "recv #1 from rank 0", "rank 0", "rank 1"])
        self.assertEqual(arrows, 2)

    def test_folded_ranks_and_one_that_has_ended(self):
        words, arrows = self.drawn(
            "  ranks 0-4, 6-63: waiting for rank 5 in all_reduce #2   k.py:7 in f\n  and 3 more\n"
        )
        self.assertEqual((words[1:], arrows), (["ranks 0-4, 6-63", "rank 5"], 1))
        words, arrows = self.drawn("  ranks 0, 2, ..., 62: waiting for ranks 1, 3, ..., 63 in barrier #1   k.py:7 in f")
        self.assertEqual((words[1:], arrows), (["ranks 0, 2, ..., 62", "ranks 1, 3, ..., 63"], 1))

    def test_several_that_one_waits_for(self):
        account = """
  rank 0: waiting for ranks 1, 2 in all_reduce #1   k.py:1 in f
  rank 1: waiting for rank 0 in all_reduce #1 of group dp   k.py:2 in f
  rank 2: waiting for rank 1 in all_reduce #1 of group tp   k.py:3 in f
"""
        words, arrows = self.drawn(account)
        self.assertEqual((words[-3:], arrows), (["rank 0", "rank 1", "rank 2"], 4))

    def test_an_account_without_waits(self):
        for account in ("", "  rank 0: passed after 0.1 s\n", "rank 1 waits for it: waits for"):
            self.assertEqual(list(wait_graph(account)), [])


if __name__ == "__main__":
    run_tests()
