"""MultiProcessTestCase: a test is skipped only if all of its ranks skip it."""

import unittest

from outcomes import outcome

CASE = """
class Subject(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        skip = TEST_SKIPS["generic"].exit_code
        {body}
"""


class SkipTest(unittest.TestCase):
    def test_rank_1_dies_while_rank_0_skips(self) -> None:
        ended, output = outcome(CASE.format(body="sys.exit(skip) if self.rank == 0 else os.abort()"))
        self.assertEqual(ended, "failed", output)
        self.assertIn("rank 1 exited with code -6", output)

    def test_rank_1_passes_while_rank_0_skips(self) -> None:
        ended, output = outcome(CASE.format(body="self.rank == 0 and sys.exit(skip)"))
        self.assertEqual(ended, "failed", output)

    def test_all_ranks_skip(self) -> None:
        ended, output = outcome(CASE.format(body="sys.exit(skip)"))
        self.assertEqual(ended, "skipped", output)


if __name__ == "__main__":
    unittest.main()
