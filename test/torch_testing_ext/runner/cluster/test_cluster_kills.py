"""Each process of a run on a Ray cluster is killed: while a node is set up, while a test runs, and at the summary."""

import os
import signal
import unittest

import pytest
from kit.files import subject
from kit.processes import descendants
from kit.ray_cluster import HAS_RAY, ClusterCase, RayCluster, command_line

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

pytestmark = pytest.mark.nightly

NODE = "127.0.0.5"  # the only one on which tests run; it joins for each run
SUITE = """
import os, time
from torch_testing_ext.common_distributed import MultiProcessTestCase
class T(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        with open({worker!r}, "w") as file:
            file.write(str(os.getpid()))
        self._spawn_processes()
    def test_a(self):
        if self.rank == 0 and {gate}.is_open():
            {gate}.close(os.getpid())
    def test_b(self): pass
"""
# The first that comes waits at a gate: it writes pids into one FIFO, and reads another one until somebody writes.
GATE = subject(__file__, "gate.py")
SUMMARY = """
import os, sys
sys.path.insert(0, {root!r})
from gate import Gate
from torch_testing_ext.runner import work_run
ended = work_run.RunEnded
def gated(summary):
    Gate({root!r}).close(os.getpid())
    return ended(summary)
work_run.RunEnded = gated
"""
PASSES, FAILS, REFUSED = 0, 1, 4
BRIDGE = "the process that speaks with Ray"
# The exit code of the run, and what it says of the death. Processes that are not here have not begun, or are over.
TABLE = {
    "set-up": {
        "bridge": (REFUSED, f"{BRIDGE} was killed by SIGKILL"),
        "actor": (PASSES, ""),  # another one begins again
        "raylet": (REFUSED, f"node {NODE} cannot run tests: Ray says that its actor has died or cannot be reached"),
        "head": (REFUSED, f"{BRIDGE} exited with code 1"),
        "driver": (-signal.SIGKILL, ""),
        "set-up command": (REFUSED, f"node {NODE} cannot run tests: cluster.setup was killed by SIGKILL"),
    },
    "test": {
        "bridge": (FAILS, f"{BRIDGE} was killed by SIGKILL"),
        "actor": (PASSES, "again, as the same attempt"),
        "agent": (PASSES, "again, as the same attempt"),
        "raylet": (FAILS, "no node is left"),
        "head": (FAILS, f"{BRIDGE} exited with code 1"),
        "driver": (-signal.SIGKILL, ""),
        "worker": (FAILS, "SIGKILL"),
        "rank": (FAILS, "rank 0 of 2 was killed by SIGKILL"),
        "set-up command": (PASSES, ""),
    },
    "summary": {
        "bridge": (PASSES, ""),
        "actor": (PASSES, ""),
        "agent": (PASSES, ""),
        "raylet": (PASSES, ""),
        "head": (PASSES, ""),
        "driver": (-signal.SIGKILL, ""),
        "set-up command": (PASSES, ""),
    },
}
CASES = [(moment, name) for moment, row in TABLE.items() for name in row]


@unittest.skipUnless(HAS_RAY, "Ray is not installed")
class TestKills(ClusterCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cluster = RayCluster(cls.addClassCleanup)

    def start_at(self, moment):
        """Start a run that waits at this moment. Returns it, and the pid of what waits."""
        self.write("gate.py", GATE)
        self.write("pyproject.toml", "")
        closed = f"__import__('gate').Gate({str(self.root)!r})"
        suite = SUITE.format(worker=str(self.root / "worker"), gate=closed)
        suite = suite if moment == "test" else suite.replace(f"{closed}.is_open()", "False")
        self.write("test/distributed/test_w.py", suite)
        for name in "waits", "go":
            os.mkfifo(self.root / name)
        wait = f"echo $$ > {self.root}/waits; head -n 1 {self.root}/go; " if moment == "set-up" else ""
        setup = f"[ -e {self.root}/set-up ] || {{ touch {self.root}/set-up; setsid sleep 1000 & {wait} }}"
        if moment == "summary":
            self.break_by(SUMMARY.format(root=str(self.root)))
        environ = {"RAY_gcs_rpc_server_reconnect_timeout_s": "2", "RAY_gcs_server_request_timeout_seconds": "2"}
        process = self.start_on(
            self.cluster.address,
            "--results=results.json", f"-ocluster.setup={setup}", f"-ocluster.only={NODE}", "-ocluster.timeout=20",
            **environ,
        )  # fmt: skip
        return process, int(self.wait_for_writer("waits", process))

    def victim(self, name, moment, process, waiting):
        """The pid of a process."""
        match name:
            case "driver":
                return process.pid
            case "bridge":
                return next(pid for pid in descendants(process.pid) if "cluster.bridge" in command_line(pid))
            case "agent":
                return next(iter(self.cluster.agents()))
            case "rank":
                return waiting
            case "worker":
                return int((self.root / "worker").read_text())
            case "set-up command" if moment == "set-up":
                return waiting
            case "set-up command":
                return next(pid for pid, line in self.cluster.of_runs().items() if line.startswith("sleep"))
        words = {"actor": ("AgentActor",), "raylet": ("raylet/raylet", f"={NODE}"), "head": ("gcs_server",)}[name]
        processes = {pid: command_line(pid) for pid in self.cluster.processes()}
        return next(pid for pid, line in processes.items() if all(word in line for word in words))

    @parametrize("moment, name", CASES, name_fn=lambda moment, name: f"{name}_at_{moment}".replace(" ", "_"))
    def test_killed(self, moment, name):
        """The run ends by itself, tells what it lost, and leaves nothing."""
        if name == "head":
            self.cluster = RayCluster(self.addCleanup, RAY_gcs_rpc_server_reconnect_timeout_s="3")
        self.cluster.change("add", NODE)
        if name not in ("head", "raylet"):
            self.addCleanup(self.cluster.change, "remove", NODE)
        process, waiting = self.start_at(moment)
        below = {*descendants(process.pid), *self.cluster.of_runs()}
        os.kill(self.victim(name, moment, process, waiting), signal.SIGKILL)
        if moment == "summary" or name == "set-up command":  # what waits goes on
            go = os.open(self.root / "go", os.O_RDWR)
            self.addCleanup(os.close, go)
            os.write(go, b"\n")
        code, said = TABLE[moment][name]
        out = self.finish(process, code)
        self.assertIn(said, out + self.stderr)
        if code in (PASSES, FAILS):
            outcomes = self.outcomes()
            self.assertEqual(set(outcomes), {"test_a", "test_b"})
            self.assertEqual(set(outcomes.values()) == {"passed"}, code == PASSES)
        # The other processes of Ray learn of the death of its head after the time that is set above.
        self.assert_nothing_is_left(below, seconds=20.0 if name == "head" else 1.0)


instantiate_parametrized_tests(TestKills)

if __name__ == "__main__":
    run_tests()
