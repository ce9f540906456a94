"""`--sweep` from the command line: the matrix on the console, in JSON and HTML, and the exit code."""

import sys

import pytest
from kit.runs import RunsCase

from torch_testing_ext.common_utils import run_tests

pytestmark = pytest.mark.slow

SUBJECT = """
import threading
import pytest
import torch.distributed as dist

@pytest.mark.world_size(2)
def test_waits(dist_env):
    from torch_testing_ext.fault_points import reached
    alive = threading.Event()
    try:
        dist.barrier()
    except RuntimeError:
        reached("an error")
        if dist_env.rank == 0:
            alive.wait()
        return
    if dist_env.rank == 2:
        reached("never")

def test_no_ranks():
    pass
"""
KNOWN = """
[[known]]
test = "test_waits.py::test_waits"
fault = "kill(rank=0, at=call(1))"
reason = "somebody said so"

[[known]]
test = "test_waits.py::test_wait"
fault = "kill(rank=0, at=call(1))"
reason = "there is no such test"
"""
HANG = "kill(rank=1, at=call(1))"


class SweepRunTest(RunsCase):
    def test_reports_and_exit_code(self):
        self.write("test_waits.py", SUBJECT)
        words = ["--sweep=kill", "-osweep.within=4", "--results=results.json", "--html=x.html", "test_waits.py"]
        if sys.version_info >= (3, 11):
            self.write("known.toml", KNOWN)
            words.insert(0, "-osweep.known=known.toml")
        told = self.finish(self.start(*words), 0)
        self.assertIn("faults of test_waits.py::test_waits:\n", told)
        self.assertRegex(told, r"\n  kill +rank 0 +rank 1\n  call\(1\) +recovered [0-9.]+ s.* +hung [0-9.]+ s\n")
        self.assertIn(f"\n  hangs: {HANG} at barrier #1: ", told)
        self.assertIn("\nno run has reached: never\n", told)
        self.assertIn("it has no ranks that a fault can end", told)
        sweeps = self.results()["sweeps"]
        tests = {test["id"].rpartition("::")[2]: test for test in sweeps["tests"]}
        ends = {cell["fault"]: cell["end"] for cell in tests["test_waits"]["cells"]}
        self.assertEqual(ends, {"kill(rank=0, at=call(1))": "recovered", HANG: "hung"})
        self.assertEqual((sweeps["not_reached"], tests["test_no_ranks"]["cells"]), (["never"], []))
        page = (self.root / "x.html").read_text()
        self.assertIn('<td class="hung"', page)
        if sys.version_info >= (3, 11):
            gone = "kill(rank=0, at=call(1)): recovered; known to hang: somebody said so"
            self.assertEqual(tests["test_waits"]["fails_no_more"], [gone])
            self.assertIn(f"hangs no more: {gone}", told)
            self.assertIn(gone, page)
            self.assertIn("no test of this run is 'test_waits.py::test_wait', which is known to hang", told)
        told = self.finish(self.start("--sweep=kill", "-osweep.within=4", "-osweep.fail=hang", "test_waits.py"), 1)
        self.assertIn(f"1 of 2 faults hang this test; the first: {HANG} at barrier #1: ", told)
        self.assertIn("--sweep kill -o sweep.within=4.0 -o sweep.fail=hang test_waits.py::test_waits", told)


if __name__ == "__main__":
    run_tests()
