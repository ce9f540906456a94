"""The plugin together with pytest-xdist, -rerunfailures, -timeout, -cov and -asyncio, in one run and each by itself."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import unittest
from pathlib import Path

from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

OTHERS = ("xdist", "pytest_rerunfailures", "pytest_timeout", "pytest_cov", "pytest_asyncio")
MISSING = [name for name in OTHERS if importlib.util.find_spec(name) is None]
# Each function is called in one kind of rank; the numbers of the lines that run there follow from the source.
MEASURED = """
def in_rank(rank):
    if rank == 0:
        return "first"
    if rank == 1:
        return "second"
    return "never"

def in_unittest_rank():
    return 1

def in_spawned_rank():
    return 2

def in_fixture():
    return 3

def in_standalone_test():
    return 4

def in_async_test():
    return 5

def in_failing_rank():
    return 6

def nowhere():
    return 7
"""
SUBJECT = """
import asyncio, os, threading
from pathlib import Path
import pytest, pytest_asyncio
import measured
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.ranks import DistributedFixture, spawn

def rank():
    return int(os.environ["RANK"])

@pytest.mark.world_size(2)
def test_ranks(dist_env):
    measured.in_rank(dist_env.rank)

def once(name):
    file = Path(__file__).with_name(name)
    is_first = not file.exists()
    file.touch()
    return is_first

@pytest.fixture
def is_first():
    return once("flaky_ran")

@pytest.mark.flaky(reruns=2)
@pytest.mark.world_size(2)
def test_flaky(is_first, dist_env):
    assert not is_first or dist_env.rank == 0

@pytest.mark.world_size(2)
def test_fails(dist_env):
    measured.in_failing_rank()
    with open(Path(__file__).with_name("runs"), "a") as file:
        file.write(f"{dist_env.rank}\\n")
    assert dist_env.rank == 0

@pytest.mark.timeout(3)
@pytest.mark.flaky(reruns=0)
@pytest.mark.world_size(2)
def test_hangs():
    if rank():
        threading.Event().wait()

@pytest.mark.timeout(120, method="thread")
@pytest.mark.world_size(2)
def test_timeout_by_a_thread(): ...

@pytest.mark.asyncio
async def test_async():
    await asyncio.sleep(0)
    assert measured.in_async_test() == 5

@pytest_asyncio.fixture
async def async_value():
    await asyncio.sleep(0)
    yield 3

@pytest.mark.world_size(2)
def test_async_fixture(async_value):
    assert async_value == 3 and asyncio.run(asyncio.sleep(0, "slept")) == "slept"

class UnittestTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_ranks(self):
        self.assertEqual(measured.in_unittest_rank(), 1)

def body(rank):
    assert measured.in_spawned_rank() == 2

def test_spawn():
    spawn(body, 2)

class in_ranks(DistributedFixture):
    def run(self):
        assert measured.in_fixture() == 3

def test_fixture(in_ranks): ...

@pytest.mark.standalone
def test_standalone():
    assert measured.in_standalone_test() == 4
"""
MODEL = {
    "test_ranks": "passed",
    "test_flaky": "passed",
    "test_fails": "failed",
    "test_hangs": "failed",
    "test_timeout_by_a_thread": "passed",
    "test_async": "passed",
    "test_async_fixture": "passed",
    "UnittestTest.test_ranks": "passed",
    "test_spawn": "passed",
    "test_fixture": "passed",
    "test_standalone": "passed",
}


@unittest.skipIf(MISSING, f"not installed: {', '.join(MISSING)}; pip install -e '.[test]' installs them")
class WithPluginsTest(PytestCase):
    def run_all(self, *options: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            measures = ("--cov=measured", "--cov-report=json", "--cov-report=")
            files = {"test_x.py": SUBJECT, "measured.py": MEASURED}
            run = run_pytest(files, *measures, "--reruns=1", "--timeout=120", *options, folder=folder)
            self.assertOutcomes(run, MODEL)
            # A rerun has fresh ranks: each of the two runs of the test ran in both ranks.
            self.assertEqual(sorted(Path(folder, "runs").read_text().split()), ["0", "0", "1", "1"])
            (measured,) = json.loads(Path(folder, "coverage.json").read_text())["files"].values()
        lines = MEASURED.splitlines()
        missed = [lines[number - 1].strip() for number in measured["missing_lines"]]
        self.assertEqual(missed, ['return "never"', "return 7"])
        self.assertIn("rank 1 of 2 failed: AssertionError: assert 1 == 0", run.messages["test_fails"])
        self.assertIn("Timeout", run.messages["test_hangs"])
        self.assertIn("timeout=60", run.messages["test_hangs"])  # the remedy

    def test_all_in_one_process(self) -> None:
        self.run_all("-p", "no:xdist")

    def test_all_under_xdist(self) -> None:
        self.run_all("-n", "2")

    def test_async_fixtures_of_ranks_are_refused(self) -> None:
        source = """
import pytest, pytest_asyncio

@pytest.mark.asyncio
@pytest.mark.world_size(2)
async def test_async(fixture_of_parent, dist_env):
    assert fixture_of_parent + dist_env.rank == 1

@pytest_asyncio.fixture
async def fixture_of_parent():
    return 1

@pytest_asyncio.fixture
async def group(dist_env): ...

@pytest.mark.world_size(2)
def test_fixture(group): ...

@pytest_asyncio.fixture
async def values(dist_env):
    yield 1

@pytest.mark.world_size(2)
def test_generator(values): ...
"""
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_async": "failed", "test_fixture": "error", "test_generator": "error"})
        self.assertIn("rank 1 of 2 failed: AssertionError: assert (1 + 1) == 1", run.messages["test_async"])
        for name, fixture in (("test_fixture", "group"), ("test_generator", "values")):
            self.assertIn(f"test_x.py::{name}: @pytest.mark.world_size: its fixture {fixture!r} is `async`", run.text)


if __name__ == "__main__":
    run_tests()
