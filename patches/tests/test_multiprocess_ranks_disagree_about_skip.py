"""MultiProcessTestCase: a test is skipped only if all of its ranks skip it."""

import unittest

from outcomes import outcome_of_ranks


class SkipTest(unittest.TestCase):
    def test_rank_1_dies_while_rank_0_skips(self) -> None:
        ended, output = outcome_of_ranks("sys.exit(skip) if self.rank == 0 else os.abort()")
        self.assertEqual(ended, "failed", output)
        self.assertIn("rank 1 exited with code -6", output)

    def test_rank_1_passes_while_rank_0_skips(self) -> None:
        ended, output = outcome_of_ranks("self.rank == 0 and sys.exit(skip)")
        self.assertEqual(ended, "failed", output)

    def test_all_ranks_skip(self) -> None:
        ended, output = outcome_of_ranks("sys.exit(skip)")
        self.assertEqual(ended, "skipped", output)


if __name__ == "__main__":
    unittest.main()
