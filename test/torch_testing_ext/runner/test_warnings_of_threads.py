"""A thread that died, of a rank or of the test itself, is a warning of the run. It takes a run of torchtest."""

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
