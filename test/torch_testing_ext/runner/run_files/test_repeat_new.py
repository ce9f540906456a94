"""`--repeat-new N`: a test that no known run has runs N times, and no retry hides a failure."""

import unittest

from kit.runs import RunsCase

OLD = """
import unittest

class T(unittest.TestCase):
    def test_known(self): pass
"""
NEW = """
    def test_new(self):
        with open("runs", "a") as file:
            file.write("x")
        assert len(open("runs").read()) != 4
"""


class RepeatNewTest(RunsCase):
    def ran(self, *words, code):
        words = ("-j1", "--results=results.json", *words)
        self.out = self.finish(self.start(*words, stdout=-1), code)
        tests = self.results()["tests"]
        return sorted((test["id"].rpartition("::")[2], test["outcome"]) for test in tests)

    def test_a_new_test_that_fails_one_time_in_five(self):
        self.write("tests/test_a.py", OLD)
        self.assertEqual(self.ran("--repeat-new", "5", code=0), [("test_known", "passed")])
        self.assertIn("--repeat-new: no run is known here, so no test counts as new", self.out)
        self.write("tests/test_a.py", OLD + NEW)
        ran = self.ran("--repeat-new", "5", "--retries", "2", code=1)
        self.assertEqual(ran, [("test_known", "passed"), ("test_new", "failed"), *[("test_new", "passed")] * 4])
        # It is known now.
        self.assertEqual(self.ran("--repeat-new", "5", code=0), [("test_known", "passed"), ("test_new", "passed")])


if __name__ == "__main__":
    unittest.main()
