"""The output of --list and --dry-run."""

import json
import unittest

from kit.invented import make_attempt, make_test, make_unit

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.report import listing
from torch_testing_ext.runner.scheduling.forecasts import forecast
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.unit_queue import Queue

FILE = "test/distributed/test_x.py"
TESTS = [
    make_test("test_a", world_size=2, devices=1, backend="nccl", timeout=2.5),
    make_test("test_b", skip="needs 4 devices, 1 available", want="4 devices"),
    make_test("test_c"),
]
BROKEN = [make_attempt(make_test("", "test_y.py", ""), TestOutcome.ERROR, "SyntaxError: so\n\nTraceback ...")]


class ListingTest(unittest.TestCase):
    def test_as_text(self):
        self.assertEqual(
            list(listing.as_text(TESTS, BROKEN)),
            [
                f"{FILE}::XTest::test_a  2 ranks, 1 device, nccl, timeout 2.5 s",
                f"{FILE}::XTest::test_b  skipped: needs 4 devices, 1 available",
                f"{FILE}::XTest::test_c",
                "test_y.py  broken: SyntaxError: so",
                "3 tests, 1 of them skipped, 1 broken file",
            ],
        )

    def test_tests_that_cannot_be_run(self):
        broken = [*BROKEN, make_attempt(make_test("test_z", "test_y.py", ""), TestOutcome.ERROR, "not run: so\n\nmore")]
        *_, last, counts = listing.as_text(TESTS, broken)
        self.assertEqual(last, "test_y.py::test_z  broken: not run: so")
        self.assertEqual(counts, "3 tests, 1 of them skipped, 1 broken file, 1 test that cannot be run")

    def test_a_name_of_several_lines(self):
        first, _ = listing.as_text([make_test("test_a\nb\udcff")], [])
        self.assertEqual(first, f"{FILE}::XTest::test_a\\nb\\udcff")

    def test_as_json(self):
        listed = json.loads(listing.as_json(TESTS, BROKEN, lambda test: 1.5 if test.method == "test_a" else None))
        self.assertEqual([test["id"] for test in listed["tests"]], [str(test.id) for test in TESTS])
        first = listed["tests"][0]
        self.assertEqual((first["world_size"], first["devices"], first["expected_seconds"]), (2, 1, 1.5))
        self.assertEqual([test["want"] for test in listed["tests"]], [None, "4 devices", None])
        self.assertEqual([broken["file"] for broken in listed["broken"]], ["test_y.py"])


class ForecastTest(unittest.TestCase):
    def test_units_start_when_their_resources_are_free(self):
        units = [make_unit(0, 2, seconds=3.0), make_unit(1, 1, seconds=2.0), make_unit(2, 1, seconds=4.0), make_unit(3)]
        leases = Leases(("a", "b"), 1)
        starts = list(forecast(Queue(units, leases), leases, lambda unit: unit.seconds or 0.5))
        self.assertEqual(
            {start.unit.number: (start.began, start.ended, start.lease.devices) for start in starts},
            {0: (0.0, 3.0, ("a", "b")), 2: (3.0, 7.0, ("a",)), 1: (3.0, 5.0, ("b",)), 3: (0.0, 0.5, ())},
        )
        self.assertEqual(list(listing.schedule_as_text(starts, ()))[-1], "4 units, 7.0 s expected")

    def test_a_dry_run_names_the_tests_that_it_skips(self):
        lacking = make_test("test_b", skip="needs 4 devices, 0 available\nmore")
        self.assertEqual(
            list(listing.schedule_as_text((), [lacking])),
            [
                f"   skipped  {FILE}::XTest::test_b: needs 4 devices, 0 available",
                "0 units, 0.0 s expected, 1 test skipped",
            ],
        )


if __name__ == "__main__":
    unittest.main()
