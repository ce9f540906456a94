"""Warnings of passing tests: that a thread died, of the run; Python's own, in its summary. By runs of torchtest."""

import pytest
from kit.runs import RunsCase

pytestmark = pytest.mark.slow

TESTS = """
import threading
import pytest

def dies(name):
    def load():
        raise ValueError("bad batch")
    thread = threading.Thread(target=load, name=name)
    thread.start()
    thread.join()

@pytest.mark.world_size(2)
def test_in_ranks(dist_env):
    dies("loader")

def test_alone():
    dies("reader")

@pytest.mark.filterwarnings("error")
@pytest.mark.world_size(2)
def test_strict(dist_env):
    dies("writer")
"""

WARNS = """
import warnings
import pytest

def warn():
    warnings.warn("old\\nand more", FutureWarning)

@pytest.mark.world_size(2)
def test_in_ranks(dist_env):
    warn()

@pytest.mark.parametrize("n", [1, 2])
def test_alone(n):
    warn()
    warnings.warn(f"number {n}")

@pytest.mark.filterwarnings("ignore")
def test_silent():
    warn()
"""


class WarningsOfThreadsTest(RunsCase):
    def test_each_dead_thread_is_told(self):
        self.write("test_it.py", TESTS)
        self.finish(self.start("-otests=.", "--results=results.json"), 1)
        results = self.results()
        outcomes = {test["id"].partition("::")[2]: test["outcome"] for test in results["tests"]}
        self.assertEqual(outcomes, {"test_in_ranks": "passed", "test_alone": "passed", "test_strict": "error"})
        expected = [
            "test_it.py::test_alone: Exception in thread reader",
            "test_it.py::test_in_ranks: Exception in thread loader: ValueError: bad batch",
        ]
        self.assertEqual(sorted(results["warnings"]), expected)

    def test_warnings_of_python_are_in_the_summary_alone(self):
        self.write("test_it.py", WARNS)
        console = self.finish(self.start("-otests=.", "-j1", "--results=results.json", "--junitxml=results.xml"), 0)
        _, _, shown = console.partition("warnings of tests:\n")
        lines = [line.strip() for line in shown.partition("\n\n")[0].splitlines()]
        self.assertEqual(
            sorted(zip(lines[::2], lines[1::2], strict=True))[:2],
            [(f"1  test_it.py:15: UserWarning: number {n}", f"test_it.py::test_alone[{n}]") for n in (1, 2)],
        )
        self.assertEqual(len(lines), 6)
        self.assertIn("3  test_it.py:6: FutureWarning: old", lines)
        self.assertRegex(console, r"\n +test_it.py::test_\S+ and 2 more tests\n")
        self.assertEqual(self.results()["warnings"], [])
        self.assertNotIn("FutureWarning", (self.root / "results.xml").read_text())
        # As your settings of pytest ask for.
        self.write("pytest.ini", "[pytest]\naddopts = --disable-warnings\n")
        self.assertNotIn("warnings of tests:", self.finish(self.start("-otests=."), 0))
