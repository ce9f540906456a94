"""With workers, cheap tests of ours run first."""

import sys
import unittest
from pathlib import Path

import torch_testing_ext

sys.path.append(str(Path(torch_testing_ext.__file__).resolve().parents[1] / "test"))

from run_order import cheapest_first
from tiers import Costs


def ordered(costs, workers, *unrecorded):
    """The ids of these tests and of those without a record, in the order of a run."""
    names = [*costs, *unrecorded]
    return cheapest_first(names, [f"test/{name}" for name in names], Costs(costs), workers)


class CheapestFirstTest(unittest.TestCase):
    def test_files_by_their_mean(self):
        costs = {"a.py::A::test_a": 3.0, "a.py::A::test_b": 0.0, "b.py::test_c": 0.9, "c.py::test_d": 2.0}
        by_file = ["b.py::test_c", "a.py::A::test_a", "a.py::A::test_b", "c.py::test_d"]
        self.assertEqual(ordered(costs, 1), by_file)
        self.assertEqual(ordered(costs, 1, "d.py::test_new"), ["d.py::test_new", *by_file])

    def test_what_is_shared_counts(self):
        costs = {"a.py::A::test_a": 0.1, "b.py::test_b": 0.5}
        self.assertEqual(ordered(costs, 1), ["a.py::A::test_a", "b.py::test_b"])
        names = ["a.py::A::test_a", "b.py::test_b"]
        self.assertEqual(cheapest_first(names, names, Costs({**costs, "a.py::A::(shared)": 1.0}), 1), names[::-1])

    def test_each_worker_has_cheap_tests_first(self):
        costs = {f"{number:02}.py::test_{test}": number / 10 for number in range(12) for test in "ab"}
        for workers in (2, 3):
            order = ordered(costs, workers)
            self.assertEqual(sorted(order), sorted(costs))
            share = len(order) // workers
            for worker in range(workers):
                part = [costs[name] for name in order[worker * share : (worker + 1) * share]]
                self.assertEqual(part, sorted(part))
                self.assertLess(part[0], 0.3)

    def test_files_of_many_tests(self):
        """A worker may get the cheap tests of the next one last, but not the costly ones of another one first."""
        counts = (1, 9, 3, 4, 11, 2, 7, 5, 1)
        costs = {
            f"{file}.py::test_{number}": float(file) for file, count in enumerate(counts) for number in range(count)
        }
        for workers in (2, 3, 4):
            order = ordered(costs, workers)
            self.assertEqual(sorted(order), sorted(costs))
            firsts = [costs[order[len(order) * worker // workers]] for worker in range(workers)]
            self.assertLess(max(firsts), 5.0)

    def test_fewer_files_than_workers(self):
        self.assertEqual(ordered({"a.py::test_a": 1.0}, 8), ["a.py::test_a"])
        self.assertEqual(ordered({}, 2), [])


if __name__ == "__main__":
    unittest.main()
