"""Runs on a real Ray cluster: one machine with two pretended nodes, started once for all tests here."""

import os
import re
import signal
import socket
import subprocess
import unittest
from pathlib import Path

import pytest
from kit.files import subject
from kit.processes import descendants
from kit.ray_cluster import HAS_RAY, ClusterCase, RayCluster, ancestor

from torch_testing_ext.common_utils import run_tests

SUITE = subject(__file__, "suite_of_two_nodes.py")
WAITS = """
import os, subprocess, time, unittest
class T(unittest.TestCase):
    def wait(self):
        starts = open({folder!r} + "/" + self.id().rpartition(".")[2], "a+")
        starts.write("x")
        starts.flush()
        if starts.seek(0) == 0 and len(starts.read()) == 1:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open({fifo!r}, "w") as fifo:
                print(os.getpid(), file=fifo)
            time.sleep(1000)
    def test_a(self): self.wait()
    def test_b(self): self.wait()
"""


@pytest.mark.slow
@unittest.skipUnless(HAS_RAY, "Ray is not installed")
class TestOnRay(ClusterCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cluster = RayCluster(cls.addClassCleanup)

    def test_one_run(self):
        """Outcomes, exit code, what is sent, what a worker of Ray hands down, devices, and the names of nodes."""
        self.write("test/distributed/test_x.py", SUITE)
        self.write(".gitignore", "*.txt\n*.so\ntmp\n")
        self.write("ignored.txt", "")
        self.write("built.so", "")
        self.write("kept", "")
        (self.root / "link").symlink_to("run_test.py")
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        meeting = self.temporary / "meeting"
        meeting.mkdir()
        process = self.start_on(
            self.cluster.address, "--cluster-nodes=2", "-ocluster.fake-gpus=true", "-ocluster.setup=touch set_up",
            "--results=results.json", "--junitxml=x.xml", "--html=x.html", "--perfetto=trace.json",
            "-ocluster.fetch=out", MINE="mine", EXPECTTEST_ACCEPT="1", MY_TOKEN="secret",
            MEETING=str(meeting),
        )  # fmt: skip
        out = self.finish(process, 1)
        self.assertEqual(out.splitlines()[-1], "6 passed, 2 failed, 2 skipped")
        self.assertEqual((self.root / "out").read_text(), "written on a node")
        self.assertIn('("new", """new""")', (self.root / "test/distributed/test_x.py").read_text())
        self.assertIn("files of the project on nodes, which stay as they are here: kept", out)
        self.assertIn("look like secrets are not sent to the nodes, unless cluster.env names them: MY_TOKEN", out)
        outcomes = self.outcomes()
        self.assertEqual((outcomes["test_fails"], outcomes["test_dies"]), ("failed", "crashed"))
        tests = {test["id"].rpartition("::")[2]: test for test in self.results()["tests"]}
        message = tests["test_fails"]["attempts"][0]["message"]
        self.assertIn("\n\ntest/distributed/test_x.py:", message)
        self.assertEqual(tests["test_passes"]["attempts"][0]["output"].split("\n"), ["mine []", "True True False"])
        nodes = [tests[f"test_of_one_node_{number}"]["attempts"][0]["node"] for number in range(4)]
        self.assertEqual(set(nodes), {"127.0.0.2", "127.0.0.3"})
        two = tests["test_two"]["attempts"][0]
        self.assertEqual((two["devices"], two["output"]), (["0", "1"], "0,1"))
        self.assertEqual(tests["test_three"]["want"], "3 devices")
        self.assertTrue(list(Path(self.cluster.folder).glob("torch_testing_ext-nodes-*/*.tar")))
        self.assertIn("ran on node 127.0.0.", out)
        self.assertIn("compiled files that git ignores are not sent to the nodes: built.so", out)
        again = f"run again:  python run_test.py --cluster {re.escape(self.cluster.address)} "
        test = "test/distributed/test_x.py::T::test_fails"
        self.assertRegex(out, rf"{again}--cluster-nodes 2 -o cluster.fake-gpus=true .*touch set_up.* {test}")
        self.assertIn("127.0.0.2 gpu 0", (self.root / "x.html").read_text())
        self.assertIn("127.0.0.3 cpu 1", (self.root / "trace.json").read_text())
        self.assertNotRegex(self.stderr, r"(?i)\bray(let)?\b")

    def start_waiting(self, count, *argv):
        """Starts a run; returns it and the pids of `count` tests that wait, and of all below their agents."""
        fifo = str(self.root / "fifo")
        os.mkfifo(fifo)
        folder = self.root / "starts"
        folder.mkdir()
        self.write("test/distributed/test_w.py", WAITS.format(fifo=fifo, folder=str(folder)))
        self.write("pyproject.toml", "")
        daemons = "-ocluster.setup=setsid sleep 1000 & sleep 1000 &"
        process = self.start_on(self.cluster.address, "--results=results.json", daemons, *argv)
        workers = []
        while len(workers) < count:
            workers += map(int, self.wait_for_writer("fifo", process).split())
        agents = {ancestor(worker, "torch_testing_ext.runner.cluster.agent") for worker in workers}
        below = {pid for agent in agents for pid in (agent, *descendants(agent))}
        below |= {pid for worker in workers for pid in descendants(worker)}
        self.assertGreaterEqual(len(below), 5)
        return (
            process,
            workers,
            below | {pid for pid, line in self.cluster.of_runs().items() if line.startswith("sleep")},
        )

    def test_an_agent_and_an_actor_are_killed(self):
        """The units of both nodes run again, as the same attempt."""
        process, workers, below = self.start_waiting(2, "-j1")
        first, second = workers
        os.kill(ancestor(first, "torch_testing_ext.runner.cluster.agent"), signal.SIGKILL)
        os.kill(ancestor(second, "AgentActor"), signal.SIGKILL)
        self.wait_until_gone(below, 10)
        out = self.finish(process, 0)
        self.assertEqual(out.splitlines()[-1], "2 passed, 0 failed, 0 skipped")
        self.assertEqual(out.count("again, as the same attempt"), 4)  # as they happen, and in the summary
        self.assertIn("its agent was killed by signal 9", out)
        self.assertIn("ActorDiedError", out)
        for test in self.results()["tests"]:
            self.assertEqual(len(test["attempts"]), 1)
        self.assert_nothing_is_left(below)

    @pytest.mark.nightly
    def test_two_runs_that_want_all_nodes(self):
        """One waits for the other, which keeps nothing that it does not need."""
        self.write("test/distributed/test_x.py", SUITE)
        chosen = ("-k", "of_one_node", "--cluster-nodes=2", "-oshared-leases=false")
        runs = [self.start_on(self.cluster.address, *chosen, "--cache", name) for name in ("one", "two")]
        for run in runs:
            out = self.finish(run, 0)
            self.assertEqual(out.splitlines()[-1], "4 passed, 0 failed, 0 skipped")
        self.assert_nothing_is_left(set())

    def test_ctrl_c(self):
        process, _, below = self.start_waiting(1, "-k", "test_a", "--cluster-nodes=1")
        process.send_signal(signal.SIGINT)
        out = self.finish(process, 2)
        self.assertIn("1 test did not finish: the run was interrupted", out)
        self.assert_nothing_is_left(below)

    def lines_until(self, process, text):
        """What run_test.py has said on stderr, to the first line with this text."""
        lines = []
        while not lines or text not in lines[-1]:
            lines.append(process.stderr.readline())
            self.assertTrue(lines[-1], f"{text!r} was never said, but {lines}")
        return lines

    @pytest.mark.nightly
    def test_nodes_come_and_go(self):
        """While a test runs, a node joins and is drained."""
        for name in "begun", "end":
            os.mkfifo(self.root / name)
        self.write("pyproject.toml", "")
        self.write(
            "test/distributed/test_w.py",
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test_a(self):\n"
            f"        open({str(self.root / 'begun')!r}, 'w').close()\n"
            f"        open({str(self.root / 'end')!r}).close()\n",
        )
        process = self.start_on(self.cluster.address)
        self.wait_for_writer("begun", process)
        before = self.cluster.agents()
        self.cluster.change("add", "127.0.0.4")
        try:
            self.lines_until(process, "node 127.0.0.4 has joined")
            (agent,) = self.cluster.agents() - before
            self.cluster.change("drain", "127.0.0.4")
            self.wait_until_gone([agent], 20)
            self.assertIsNone(process.poll())
        finally:
            self.cluster.change("remove", "127.0.0.4")
        with open(self.root / "end", "w"):
            pass
        out = self.finish(process, 0)
        self.assertEqual(out.splitlines()[-1], "1 passed, 0 failed, 0 skipped")
        self.assertIn("node 127.0.0.4: it is about to be taken away, so it gets no more tests", out)
        self.assertNotIn("node 127.0.0.4 was lost", out)

    def test_refused(self):
        self.write("test/distributed/test_x.py", SUITE)
        error = self.refuse(self.cluster.address, "-ocluster.gpus-per-node=3", "-ocluster.timeout=1")
        self.assertIn("no run after 1 s of waiting: 3 GPUs and a CPU; no node of the cluster", error)
        error = self.refuse(self.cluster.address, "-ocluster.only=127.0.0.9")
        self.assertIn("leave none of the nodes of the cluster: 127.0.0.2, 127.0.0.3", error)
        error = self.refuse(self.cluster.address, "-ocluster.setup=echo no compiler; exit 3")
        self.assertRegex(error, "node 127.* cannot run tests: cluster.setup exited with code 3: no compiler")
        error = self.refuse(self.cluster.address, "-ocluster.root=/no/such/folder")
        self.assertIn("there is no folder /no/such/folder", error)

    def test_no_room_in_the_object_store(self):
        """On a node that may not use its disk instead."""
        self.write("test/distributed/test_x.py", SUITE)
        with open(self.root / "large", "wb") as file:
            file.truncate(100 << 20)
        self.cluster.change("add", "127.0.0.6", "RAY_local_fs_capacity_threshold=0.0001")
        try:
            error = self.refuse(self.cluster.address, "-ocluster.only=127.0.0.6")
            self.assertEqual(
                error,
                "run_test.py: node 127.0.0.6 cannot run tests: the object store of Ray has no room for the project: "
                "use cluster.root, or start Ray with more\n",
            )
            self.assertEqual(self.cluster.agents(), set())
        finally:
            self.cluster.change("remove", "127.0.0.6")


class TestWithoutCluster(ClusterCase):
    def setUp(self):
        super().setUp()
        self.write("test/distributed/test_x.py", SUITE)

    @pytest.mark.slow
    def test_contradictions(self):
        cases = {
            ("--fake-accelerators=2",): "--fake-accelerators and --cluster cannot be combined",
            ("--gpus=2",): "--cluster and --gpus cannot be combined",
            ("--cluster-nodes=0",): "not a whole number",
        }
        for words, said in cases.items():
            with self.subTest(words=words):
                error = self.refuse("auto", *words)
                self.assertIn(said, error)
                self.assertEqual(error.count("\n"), 1)
        for address in "", "somewhere", "host:", ":1", "ray://", "host:99999":
            with self.subTest(address=address):
                self.assertIn("is not auto, slurm, HOST:PORT or ray://HOST:PORT", self.refuse(address))
        self.finish(self.start("--cluster-nodes=2"), 4)
        self.assertIn("--cluster-nodes needs --cluster", self.stderr)

    @unittest.skipIf(HAS_RAY, "Ray is installed")
    def test_no_ray(self):
        self.assertIn("python -m pip install 'ray>=2.40'", self.refuse("auto"))

    @unittest.skipUnless(HAS_RAY, "Ray is not installed")
    def test_nothing_at_the_address(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for address in f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}":
            with self.subTest(address=address):
                error = self.refuse(address)
                self.assertIn(f"no Ray cluster answers at {address}", error)
                self.assertEqual(error.count("\n"), 1)


if __name__ == "__main__":
    run_tests()
