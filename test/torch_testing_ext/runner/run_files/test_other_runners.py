"""JUnit XML in the forms of runners of other languages, as each writes it."""

import unittest
from pathlib import Path

from kit.files import FolderCase

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.run_files.census import HoleReason, take_census
from torch_testing_ext.runner.run_files.definitions import find_definitions
from torch_testing_ext.runner.run_files.reading import read_results

SAMPLES = Path(__file__).with_name("subjects") / "junit"
PASSED, FAILED, ERROR = TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.ERROR
SKIPPED, FLAKY = TestOutcome.SKIPPED, TestOutcome.FLAKY
# Each case of a sample: its class, name, outcome, seconds and message.
CASES = {
    "jest": [
        ("Sum adds two numbers", "Sum adds two numbers", PASSED, 0.003, ""),
        ("Sum is exact", "Sum is exact", FAILED, 0.005, "Error: expect(received).toBe(expected) // Object.is equality"),
        ("Sum needs a GPU", "Sum needs a GPU", SKIPPED, 0.0, ""),
    ],
    "go": [
        ("example.com/project/sum", "TestSum/negative", PASSED, 0.06, ""),
        ("example.com/project/sum", "TestExact", FAILED, 0.1, "Failed"),
        ("example.com/project/sum", "TestLong", SKIPPED, 0.0, "sum_test.go:20: not with -short"),
    ],
    "gtest": [
        ("RingTest", "Sums", PASSED, 0.001, ""),
        ("RingTest", "Exact", FAILED, 0.009, "Expected equality of these values:"),
        ("RingTest", "DISABLED_Slow", SKIPPED, 0.0, "notrun"),
        ("Sizes/RingTest", "Two/0", SKIPPED, 0.0, "needs a GPU"),
    ],
    "surefire": [
        ("org.example.SumTest", "adds", PASSED, 1234.5, ""),
        ("org.example.SumTest", "isExact", ERROR, 0.002, "3 and 4"),
        ("org.example.SumTest", "sometimes", FLAKY, 0.004, "too early"),
        ("org.example.SumTest", "onWindows", SKIPPED, 0.0, "Disabled on operating system: Linux"),
    ],
    "bazel": [
        ("", "tests/exact_test", FAILED, 3.0, "exited with error code 1"),
        ("", "tests/sum_test", PASSED, 2.0, ""),
    ],
    "nextest": [
        ("project::bin/sum", "tests::adds", PASSED, 0.005, ""),
        ("project::bin/sum", "tests::is_exact", FAILED, 0.006, "thread 'tests::is_exact' panicked at src/sum.rs:9:5"),
        ("project::bin/sum", "tests::sometimes", FLAKY, 0.007, "too early"),
    ],
}


class SamplesTest(unittest.TestCase):
    def test_each_sample_has_its_cases(self):
        self.assertEqual({path.stem for path in SAMPLES.iterdir()}, set(CASES))

    def test_cases(self):
        for name, cases in CASES.items():
            (run,) = read_results(SAMPLES / f"{name}.xml")
            found = [
                (each.test.cls, each.test.method, each.outcome, each.seconds, each.message) for each in run.results
            ]
            for one, expected in zip(found, cases, strict=True):
                with self.subTest(name, case=expected[1]):
                    self.assertEqual(one, expected)

    def test_machine_and_time(self):
        (go,) = read_results(SAMPLES / "go.xml")
        (gtest,) = read_results(SAMPLES / "gtest.xml")
        self.assertEqual((go.machine, go.clock), ("worker-7", 1795946400.0))
        self.assertAlmostEqual(gtest.clock, 1795946400.123, 3)


class WholeFilesTest(FolderCase):
    """Bazel tells of a whole file whether it passed: which of its tests ran is not known."""

    def test_bazel(self):
        for name in ("sum", "exact", "other"):
            self.write(f"tests/{name}_test.py", "def test_x(): pass\n")
        census = take_census(
            find_definitions(self.root, [self.root / "tests"]), list(read_results(SAMPLES / "bazel.xml"))
        )
        reasons = {hole.file: (hole.reason, hole.detail) for hole in census.holes}
        of_file = (HoleReason.UNKNOWN, "only a result of the whole file: which of its tests ran is not known")
        self.assertEqual(reasons["tests/sum_test.py"], of_file)
        self.assertEqual(reasons["tests/exact_test.py"], of_file)
        self.assertIs(reasons["tests/other_test.py"][0], HoleReason.NEVER_COLLECTED)
        self.assertEqual(census.strangers, ())


if __name__ == "__main__":
    unittest.main()
