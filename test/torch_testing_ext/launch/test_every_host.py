"""One corpus of faults in every host of ranks: each has the same outcome and names the same rank, or the gap is listed.

Hosts are processes of a class, persistent ranks, threads, functions (`spawn`), functions with pytest's mark, and a
class under run_test.py.
"""

import unittest
from pathlib import Path

import pytest
from kit.outcomes import Seen
from kit.planted_ranks import outcome_with_tear_down
from kit.project import Project
from kit.pytest_runs import run_pytest
from kit.rank_faults import ERROR, FAILED, FAULTS, PASSED, SKIPPED, WORLD_SIZE, end_hangs
from kit.ranks import Ranks
from kit.settings import timeout

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiThreadedTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.ranks import spawn

# Seconds until a hang ends. Other faults must end a test by themselves.
SHORT = 1.0
PATH = str(Path(__file__).resolve().parents[1])
THREADS_DIE_TOGETHER = "it ends the process, in which the ranks are threads"
GAPS = {
    ("threads", "exits_with_0"): THREADS_DIE_TOGETHER,
    ("threads", "exits_with_3"): THREADS_DIE_TOGETHER,
    ("threads", "is_killed"): THREADS_DIE_TOGETHER,
    ("threads", "crashes"): THREADS_DIE_TOGETHER,
}
# pytest knows no errors of tests, only those of fixtures. For unittest, what `spawn` raises is an AssertionError, too,
# whatever it was in the rank.
WITHOUT_ERRORS = {PASSED: "passed", FAILED: "failed", ERROR: "failed", SKIPPED: "skipped"}


def methods():
    """The corpus as methods of a test case in ranks."""
    return {name: lambda self, body=fault.body: body(self.rank) for name, fault in FAULTS.items()}


class Threads(MultiThreadedTestCase):
    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_threads()


def function_in_ranks(fault):
    """A test without ranks of its own, which calls a function in ranks."""
    body, limit = FAULTS[fault].body, SHORT if FAULTS[fault].hangs else None
    return unittest.FunctionTestCase(lambda: spawn(body, WORLD_SIZE, timeout=limit))


HOSTS = {
    "processes": type("Processes", (Ranks,), methods()),
    "persistent": type("Persistent", (MultiProcContinuousTest,), {"world_size": WORLD_SIZE, **methods()}),
    "threads": type("Threads", (Threads,), methods()),
    "function": function_in_ranks,
}
MARKED = f"""
import sys
import pytest
sys.path.append({PATH!r})
from kit.rank_faults import FAULTS, WORLD_SIZE

@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.hangs])
@pytest.mark.world_size(WORLD_SIZE)
def test_fault(name, dist_env):
    FAULTS[name].body(dist_env.rank)

@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.hangs])
@pytest.mark.world_size(WORLD_SIZE, timeout={SHORT})
def test_hang(name, dist_env):
    FAULTS[name].body(dist_env.rank)
"""
IN_RUNNER = f"""
import sys
sys.path.append({PATH!r})
from kit.rank_faults import FAULTS
from kit.ranks import Ranks
from torch_testing_ext._testing.bases import ranked_test_case

class Faults(Ranks): pass
for name, fault in FAULTS.items():
    setattr(Faults, f"test_{{name}}", lambda self, body=fault.body: body(self.rank))
    if fault.hangs:
        ranked_test_case.TIMEOUT_OVERRIDE[f"test_{{name}}"] = {SHORT}
"""


class EveryHostTest(unittest.TestCase):
    maxDiff = None

    def check(self, host, name, seen, outcome):
        fault = FAULTS[name]
        self.assertEqual(seen.outcome, outcome, f"{name} in {host}:\n{seen.message}")
        self.assertRegex(seen.message, fault.pattern, f"{name} in {host}")
        if not fault.hangs:
            self.assertNotIn("timed out", seen.message)

    def test_gaps_name_hosts_and_faults(self):
        self.assertLessEqual({host for host, _ in GAPS}, {*HOSTS, "marked", "runner"})
        self.assertLessEqual({fault for _, fault in GAPS}, {*FAULTS})

    @pytest.mark.slow
    def test_hosts_of_unittest(self):
        for host, case in HOSTS.items():
            for name, fault in FAULTS.items():
                if (host, name) in GAPS:
                    continue
                with self.subTest(host=host, fault=name), timeout(SHORT if fault.hangs else 300.0):
                    seen = Seen(*outcome_with_tear_down(case(name)))
                    end_hangs()
                    self.check(host, name, seen, WITHOUT_ERRORS[fault.outcome] if host == "function" else fault.outcome)

    @pytest.mark.slow
    def test_functions_of_pytest(self):
        run = run_pytest({"test_x.py": MARKED})
        self.assertEqual(len(run.outcomes), len(FAULTS), run.text + run.errors)
        for name, fault in FAULTS.items():
            with self.subTest(fault=name):
                test = f"test_{'hang' if fault.hangs else 'fault'}[{name}]"
                seen = Seen(run.outcomes[test], run.messages[test])
                self.check("marked", name, seen, WITHOUT_ERRORS[fault.outcome])
                self.assertRegex(seen.message.partition("\n")[0], fault.pattern)

    @pytest.mark.slow
    def test_under_the_runner(self):
        project = Project()
        self.addCleanup(project.close)
        ran = project.run(project.write(IN_RUNNER))
        self.assertEqual(len(ran.outcomes), len(FAULTS))
        for name, fault in FAULTS.items():
            with self.subTest(fault=name):
                test = f"test_{name}"
                self.check("runner", name, Seen(ran.outcomes[test], ran[test].said), fault.in_runner)


if __name__ == "__main__":
    run_tests()
