"""The rule for tensors that ranks must hold alike: tables of looks, without ranks."""

import json
import unittest

from torch_testing_ext._collectives.findings.diverged_replicas import END, Look, first_diverged
from torch_testing_ext.common_utils import run_tests

GROUP = json.dumps(["0", "default_pg", [0, 1, 2], 0, "store"])
AROUND_TWO_STEPS = [2, 3, 4, 5]


def looks(values, points=(*AROUND_TWO_STEPS, END), model="DDP 0", is_buffer=False):
    """A look with the digest `values[n]` of a tensor, at each point."""
    return [
        Look(f"{model} {GROUP}", point, ["k.py", 7, "f"], {"w": (value, [4], is_buffer)})
        for point, value in zip(points, values, strict=True)
    ]


class PartedTest(unittest.TestCase):
    def assert_said(self, expected, *of_ranks):
        found = first_diverged(dict(enumerate(of_ranks)))
        self.assertEqual(found and found.sentence, expected)
        return found

    def test_when_ranks_part_for_good(self):
        table = (
            ([9, 9, 9, 9, 9], "before step 1"),
            ([0, 9, 9, 9, 9], "in step 1"),
            ([0, 0, 9, 9, 9], "between steps 1 and 2"),
            ([0, 0, 0, 9, 9], "in step 2"),
        )
        for values, when in table:
            with self.subTest(when=when):
                said = f"rank 1 has diverged from ranks 0, 2 {when}: w [4] (DDP in the default group)"
                found = self.assert_said(said, looks([0] * 5), looks(values), looks([0] * 5))
                self.assertEqual((found.ranks, found.is_hazard), ((1,), False))
                self.assertEqual(str(found.lines[1]), "rank 1: w is 00000009   k.py:7 in f")

    def test_differences_that_do_not_count(self):
        table = {
            "averaged later": [0, 9, 0, 9, 9],
            "averaged after the last step": [0, 9, 9, 9, 0],
            "written after the last step": [0, 0, 0, 0, 9],
            "not to be read": [0, None, None, None, None],
        }
        for what, values in table.items():
            with self.subTest(what):
                self.assert_said(None, looks([0] * 5), looks(values))
        with self.subTest("a rank alone"):
            self.assert_said(None, looks([0] * 5), [])
        with self.subTest("no look after the last step"):
            points = AROUND_TWO_STEPS
            self.assert_said(None, looks([0, 0, 0, 0], points), looks([0, 0, 0, 9], points))
        with self.subTest("other models"):
            self.assert_said(None, looks([0] * 5), looks([9] * 5, model="DDP 1"))
        with self.subTest("more steps in one rank"):
            self.assert_said(None, looks([0, 1, 0], [2, 3, END]), looks([0, 1, 1, 2, 0]))

    def test_a_rank_that_leaves_out_a_step(self):
        first, second = [2, 3, 4, 5, 6, 7, END], AROUND_TWO_STEPS
        found = first_diverged({0: looks([0, 1, 1, 2, 2, 3, 3], first), 1: looks([0, 1, 8, 9, 9], (*second, END))})
        self.assertIn("has diverged from rank 1 between steps 1 and 2: w", found.sentence)

    def test_the_first_model_and_parameters_before_buffers(self):
        both = [*looks([0, 9, 9], [2, 3, END], "SGD 0"), *looks([9] * 5)]
        same = [*looks([0, 0, 0], [2, 3, END], "SGD 0"), *looks([0] * 5)]
        self.assertIn("in step 1: w [4] (SGD in", first_diverged({0: same, 1: both}).sentence)
        found = first_diverged({0: looks([0] * 5, is_buffer=True), 1: looks([9] * 5, is_buffer=True)})
        self.assertTrue(found.is_hazard)
        self.assertTrue(found.sentence.endswith("; the next forward overwrites it with that of rank 0"))


if __name__ == "__main__":
    run_tests()
