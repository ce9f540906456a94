"""MultiProcessTestCase: a rank that dies counts, whichever it is."""

import unittest

from outcomes import outcome_of_ranks


class ExitCodeTest(unittest.TestCase):
    def test_rank_1_exits_with_a_code(self) -> None:
        ended, output = outcome_of_ranks("self.rank == 1 and os._exit(3)")
        self.assertEqual(ended, "failed", output)
        self.assertIn("rank 1", output)

    def test_rank_1_is_killed(self) -> None:
        ended, output = outcome_of_ranks("self.rank == 1 and os.kill(os.getpid(), signal.SIGKILL)")
        self.assertEqual(ended, "failed", output)

    def test_all_ranks_pass(self) -> None:
        ended, output = outcome_of_ranks("pass")
        self.assertEqual(ended, "passed", output)

    def test_a_special_code_is_that_of_rank_0(self) -> None:
        body = "os._exit(7 if self.rank == 0 else 0)"
        special = "\n    def _join_processes(self, fn):\n        self.special_return_code_checks = {fn: 7}"
        ended, output = outcome_of_ranks(body, special + "\n        super()._join_processes(fn)")
        self.assertEqual(ended, "passed", output)


if __name__ == "__main__":
    unittest.main()
