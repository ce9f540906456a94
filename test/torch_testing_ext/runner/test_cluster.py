"""Runs on a real Ray cluster: one machine with two pretended nodes, started once for all tests here."""

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from kit.processes import descendants, is_alive
from kit.runs import ROOT, RunsCase

from torch_testing_ext._process import system
from torch_testing_ext.common_utils import run_tests

HAS_RAY = importlib.util.find_spec("ray") is not None
CLUSTER = """
import os, sys, time
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="120", RAY_worker_niceness="0")
from ray.cluster_utils import Cluster
more = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True,
    head_node_args={"node_ip_address": "127.0.0.2", "temp_dir": sys.argv[1], "include_dashboard": False, **more},
)
cluster.add_node(node_ip_address="127.0.0.3", **more)
print(cluster.address, flush=True)
nodes = {}
for line in sys.stdin:
    command, address, *settings = line.split()
    if command == "add":
        environ = dict(setting.split("=") for setting in settings)
        os.environ.update(environ)
        nodes[address] = cluster.add_node(node_ip_address=address, **more)
        for name in environ:
            del os.environ[name]
    elif command == "remove":
        cluster.remove_node(nodes.pop(address))
    else:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2
        deadline = int(time.time() * 1000) + 300_000
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        GcsClient(address=cluster.address).drain_node(nodes[address].node_id, reason, "a test", deadline)
    print("done", flush=True)
cluster.shutdown()
"""
SUITE = """
import os, pathlib, time, unittest
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
class T(unittest.TestCase):
    def test_passes(self):
        print(os.environ.get("MINE"), [name for name in os.environ if name.startswith("RAY_")])
        print(pathlib.Path("link").is_symlink(), pathlib.Path("set_up").exists(), pathlib.Path("ignored.txt").exists())
    def test_fails(self): self.assertEqual(1, 2)
    def test_dies(self): os._exit(7)
    def test_of_one_node_0(self): time.sleep(0.5)
    def test_of_one_node_1(self): time.sleep(0.5)
    def test_of_one_node_2(self): time.sleep(0.5)
    def test_of_one_node_3(self): time.sleep(0.5)
class Devices(unittest.TestCase):
    def setUp(self): print(os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"])
    @skip_if_lt_x_gpu(2)
    def test_two(self): pass
    @skip_if_lt_x_gpu(3)
    def test_three(self): pass
"""
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


def start_cluster(add_cleanup):
    global ADDRESS, FOLDER, CLUSTER_PROCESS
    FOLDER = tempfile.mkdtemp(prefix="tte_ray_", dir="/tmp")  # short: Ray's sockets are below it
    add_cleanup(shutil.rmtree, FOLDER, ignore_errors=True)
    Path(FOLDER, "ray").mkdir()  # in TMPDIR, Ray expects it
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "TMPDIR": FOLDER,  # the nodes keep projects there
    }
    with open(Path(FOLDER, "errors"), "wb") as errors:
        cluster = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, FOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            text=True,
            start_new_session=True,
        )
    add_cleanup(end_cluster, cluster)
    CLUSTER_PROCESS = cluster
    ADDRESS = cluster.stdout.readline().strip()
    if not ADDRESS:
        raise RuntimeError(f"Ray did not start: {Path(FOLDER, 'errors').read_text()[-3000:]}")


def change_cluster(*words):
    """Add, drain or remove the node of an address."""
    print(*words, file=CLUSTER_PROCESS.stdin, flush=True)
    if CLUSTER_PROCESS.stdout.readline() != "done\n":
        raise RuntimeError(f"{words} failed: {Path(FOLDER, 'errors').read_text()[-3000:]}")


def end_cluster(cluster):
    below = descendants(cluster.pid)
    cluster.stdin.close()
    cluster.stdout.close()
    try:
        cluster.wait(30)
    except subprocess.TimeoutExpired:
        cluster.kill()
        cluster.wait()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ancestors(pid):
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")


def ancestor(pid, word):
    """The nearest ancestor of a process whose command line has a word."""
    return next(one for one in ancestors(pid) if word.encode() in command_line(one))


def wait_until_gone(case, pids, seconds):
    deadline = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(fd)
    left = [system.describe(pid) for pid in pids if is_alive(pid)]
    case.assertEqual(left, [])


def agents():
    """The agents on all nodes of this cluster, by pid."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_one = b"torch_testing_ext.runner.agent" in (folder / "cmdline").read_bytes()
            if is_one and f"TMPDIR={FOLDER}\0".encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


class ClusterCase(RunsCase):
    def start_on(self, address, *argv, **more):
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
        try:
            return self.start("--cluster", address, *argv, environ={"PYTHONPATH": path, **more})
        finally:
            signal.signal(signal.SIGINT, before)

    def refuse(self, address, *argv):
        process = self.start_on(address, *argv)
        out = self.finish(process, 4)
        self.assertEqual(out, "")
        lines = self.stderr.splitlines(keepends=True)  # one in ten seconds says what the run waits for
        return "".join(line for line in lines if not line.startswith("run_test.py: waiting for "))


@unittest.skipUnless(HAS_RAY, "Ray is not installed: pip install 'torch-testing-ext[ray]'")
class TestOnRay(ClusterCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        start_cluster(cls.addClassCleanup)

    def test_one_run(self):
        """Outcomes, exit code, what is sent, what a worker of Ray hands down, devices, and the names of nodes."""
        self.write("test/distributed/test_x.py", SUITE)
        self.write(".gitignore", "*.txt\n*.so\ntmp\n")
        self.write("ignored.txt", "")
        self.write("built.so", "")
        (self.root / "link").symlink_to("run_test.py")
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        process = self.start_on(
            ADDRESS, "--cluster-fake-gpus", "--cluster-setup", "touch set_up", "--results=results.json",
            "--junit=x.xml", "--html=x.html", "--trace=trace.json", MINE="mine",
        )  # fmt: skip
        out = self.finish(process, 1)
        self.assertEqual(out.splitlines()[-1], "5 passed, 2 failed, 2 skipped")
        outcomes = self.outcomes()
        self.assertEqual((outcomes["test_fails"], outcomes["test_dies"]), ("failed", "crashed"))
        tests = {test["id"].rpartition("::")[2]: test for test in self.results()["tests"]}
        self.assertEqual(tests["test_passes"]["attempts"][0]["output"].split("\n"), ["mine []", "True True False"])
        nodes = [tests[f"test_of_one_node_{number}"]["attempts"][0]["node"] for number in range(4)]
        self.assertEqual(set(nodes), {"127.0.0.2", "127.0.0.3"})
        two = tests["test_two"]["attempts"][0]
        self.assertEqual((two["devices"], two["output"]), (["0", "1"], "0,1"))
        self.assertEqual(tests["test_three"]["want"], "3 devices")
        self.assertTrue(list(Path(FOLDER).glob("torch_testing_ext-nodes-*/*.tar")))
        self.assertIn("it ran on node 127.0.0.", out)
        self.assertIn("compiled files that git ignores are not sent to the nodes: built.so", out)
        self.assertIn(f"python run_test.py --cluster {ADDRESS} test/distributed/test_x.py::T::test_fails", out)
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
        process = self.start_on(ADDRESS, "--results=results.json", *argv)
        workers = []
        while len(workers) < count:
            with open(fifo) as reading:
                workers += map(int, reading.read().split())
        agents = {ancestor(worker, "torch_testing_ext.runner.agent") for worker in workers}
        below = {pid for agent in agents for pid in (agent, *descendants(agent))}
        below |= {pid for worker in workers for pid in descendants(worker)}
        self.assertGreaterEqual(len(below), 5)
        return process, workers, below

    def test_an_agent_and_an_actor_are_killed(self):
        """The units of both nodes run again, as the same attempt."""
        process, workers, below = self.start_waiting(2, "-j1")
        first, second = workers
        os.kill(ancestor(first, "torch_testing_ext.runner.agent"), signal.SIGKILL)
        os.kill(ancestor(second, "AgentActor"), signal.SIGKILL)
        wait_until_gone(self, below, 10)
        out = self.finish(process, 0)
        self.assertEqual(out.splitlines()[-1], "2 passed, 0 failed, 0 skipped")
        self.assertEqual(out.count("again, as the same attempt"), 4)  # as they happen, and in the summary
        self.assertIn("its agent was killed by signal 9", out)
        self.assertIn("ActorDiedError", out)
        for test in self.results()["tests"]:
            self.assertEqual(len(test["attempts"]), 1)

    def test_ctrl_c(self):
        process, _, below = self.start_waiting(1, "-k", "test_a", "--cluster-nodes=1")
        process.send_signal(signal.SIGINT)
        out = self.finish(process, 2)
        self.assertIn("1 test did not finish: the run was interrupted", out)
        wait_until_gone(self, below, 2)

    def test_run_test_is_killed(self):
        process, _, below = self.start_waiting(1, "-k", "test_a", "--cluster-nodes=1")
        below |= descendants(process.pid)
        process.kill()
        wait_until_gone(self, below, 4)
        self.assertEqual(list(self.temporary.glob("torch_testing_ext_run_*/project.tar")), [])

    def lines_until(self, process, text):
        """What run_test.py has said on stderr, to the first line with this text."""
        lines = []
        while not lines or text not in lines[-1]:
            lines.append(process.stderr.readline())
            self.assertTrue(lines[-1], f"{text!r} was never said, but {lines}")
        return lines

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
        process = self.start_on(ADDRESS)
        self.wait_for_writer("begun", process)
        before = agents()
        change_cluster("add", "127.0.0.4")
        try:
            self.lines_until(process, "node 127.0.0.4 has joined")
            (agent,) = agents() - before
            change_cluster("drain", "127.0.0.4")
            wait_until_gone(self, [agent], 20)
            self.assertIsNone(process.poll())
        finally:
            change_cluster("remove", "127.0.0.4")
        with open(self.root / "end", "w"):
            pass
        out = self.finish(process, 0)
        self.assertEqual(out.splitlines()[-1], "1 passed, 0 failed, 0 skipped")
        self.assertIn("node 127.0.0.4: it is about to be taken away: it gets no further tests", out)
        self.assertNotIn("node 127.0.0.4 was lost", out)

    def test_refused(self):
        self.write("test/distributed/test_x.py", SUITE)
        self.assertIn("no node of the cluster", self.refuse(ADDRESS, "--cluster-gpus-per-node=3"))
        error = self.refuse(ADDRESS, "--cluster-setup=echo no compiler; exit 3")
        self.assertRegex(error, "node 127.* cannot run tests: --cluster-setup exited with code 3: no compiler")
        error = self.refuse(ADDRESS, "--cluster-root=/no/such/folder")
        self.assertIn("there is no folder /no/such/folder", error)

    def test_no_room_in_the_object_store(self):
        """On a node that may not use its disk instead."""
        self.write("test/distributed/test_x.py", SUITE)
        with open(self.root / "large", "wb") as file:
            file.truncate(100 << 20)
        change_cluster("add", "127.0.0.6", "RAY_local_fs_capacity_threshold=0.0001")
        try:
            error = self.refuse(ADDRESS)
            self.assertEqual(
                error,
                "run_test.py: node 127.0.0.6 cannot run tests: the object store of Ray has no room for the project: "
                "use --cluster-root, or start Ray with more\n",
            )
            self.assertEqual(agents(), set())
        finally:
            change_cluster("remove", "127.0.0.6")


class TestWithoutCluster(ClusterCase):
    def setUp(self):
        super().setUp()
        self.write("test/distributed/test_x.py", SUITE)

    def test_contradictions(self):
        cases = {
            ("--fake-gpus=2",): "--cluster and --fake-gpus cannot be combined",
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
        self.assertIn("pip install 'torch-testing-ext[ray]'", self.refuse("auto"))

    @unittest.skipUnless(HAS_RAY, "Ray is not installed: pip install 'torch-testing-ext[ray]'")
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
