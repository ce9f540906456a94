"""The agent of a node at the other end of a socket: all kinds of ends of tests, of the agent and of the stream."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
import types
import unittest
from dataclasses import replace

import pytest
from kit.agents import AGENT, Nodes, prepare_for
from kit.files import subject
from kit.jumping_loop import JumpingLoop
from kit.processes import clean_environ, descendants, is_alive
from kit.warm import start_agent

from torch_testing_ext._process.messages import to_line
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner import events
from torch_testing_ext.runner.cluster import cluster_nodes
from torch_testing_ext.runner.cluster.agent_messages import (
    HEARTBEAT,
    MOST_MISSING,
    AgentAlive,
    AgentHello,
    AllFilesSent,
    BeganInUnit,
    ClusterError,
    FileChanged,
    FindTests,
    FromAgent,
    NodeReady,
    RunUnit,
    ToAgent,
)
from torch_testing_ext.runner.cluster.cluster_nodes import ClusterNodes
from torch_testing_ext.runner.cluster.json_lines import MessageReader, NotAMessage
from torch_testing_ext.runner.cluster.node_environment import facts_of_machine
from torch_testing_ext.runner.cluster.remote_node import JoiningNode
from torch_testing_ext.runner.cluster.slurm_allocation import CommandLauncher
from torch_testing_ext.runner.model import Lease, Test, TestId, Unit
from torch_testing_ext.runner.scheduling.node_leases import NodeLeases

KINDS = subject(__file__, "kinds_of_ends.py")
# Waits in a session of its own below the worker, too; the FIFO gets the pid of the worker.
WAITS = """
import os, subprocess, time, unittest
class T(unittest.TestCase):
    def test_a_waits(self):
        waits = {times} > len(open({count!r}, "a+").write("x") and open({count!r}).read())
        if waits:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open({fifo!r}, "w") as fifo:
            print(os.getpid(), file=fifo)
        if waits:
            time.sleep(1000)
    def test_b_is_fine(self): pass
"""


def read_pid(fifo):
    with open(fifo) as file:
        return int(file.read())


def wait_until_gone(case, pids, seconds):
    """Fails if a process is left after so many seconds."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                left = max(0.0, deadline - time.monotonic())
                case.assertTrue(select.select([fd], [], [], left)[0] or not is_alive(pid), f"{pid} is left")
            finally:
                os.close(fd)


class OneRunTest(unittest.TestCase):
    """All outcomes over two nodes."""

    @classmethod
    def setUpClass(cls):
        with Nodes("a", "b", fake_devices=("0", "1")) as nodes:
            file = nodes.write(KINDS)
            more = nodes.write(
                "import os, unittest\n"
                "from torch_testing_ext.common_distributed import skip_if_lt_x_gpu\n"
                "class T(unittest.TestCase):\n"
                "    def setUp(self): print(os.environ['TORCH_TESTING_EXT_FAKE_DEVICES'])\n"
                + "".join(
                    f"    @skip_if_lt_x_gpu({width})\n    def test_{number}(self): pass\n"
                    for number, width in enumerate((1, 2, 1, 2, 1, 3))
                )
            )
            cls.root = nodes.root
            cls.ran = nodes.run(file, more, retries=1)
            cls.is_free = nodes.is_free
            cls.pids = {pid for name in "ab" for pid in (nodes.pid(name), *descendants(nodes.pid(name)))}

    def test_outcomes(self):
        expected = {
            "test_passes": "passed",
            "test_fails": "failed",
            "test_errs": "error",
            "test_skips": "skipped",
            "test_dies": "crashed",
            "test_leaks": "leaked",
            "test_hangs": "timeout",
            "test_1": "passed",
            "test_2": "crashed",
            "test_3": "passed",
        }
        by_id = {name.partition("::")[2]: outcome for name, outcome in self.ran.by_id.items() if "test_1.py" in name}
        self.assertEqual({name.partition("::")[2]: outcome for name, outcome in by_id.items()}, expected)
        self.assertEqual(len(self.ran.attempts["test_fails"]), 2)

    def test_attempts_are_complete(self):
        self.assertIn("hello from a node", self.ran["test_passes"].output)
        self.assertIn("AssertionError", self.ran["test_fails"].said)
        self.assertIn("python run_test.py", self.ran["test_fails"].said)
        self.assertIn("in test_hangs", self.ran["test_hangs"].said)
        self.assertTrue(self.ran["test_leaks"].end.leftovers)
        for attempts in self.ran.attempts.values():
            for attempt in attempts:
                self.assertLessEqual(0.0, attempt.began, attempt)
                self.assertLessEqual(attempt.began + attempt.seconds, self.ran.summary.seconds, attempt)

    def test_every_attempt_names_its_node(self):
        nodes = {one.lease.node for attempts in self.ran.attempts.values() for one in attempts if one.lease.slots}
        self.assertEqual(nodes, {"a", "b"})

    def test_devices_of_a_node(self):
        self.assertEqual(self.ran.by_id["test_2.py::T::test_5"], "skipped")  # needs three; no node has them
        widths = {0: 1, 1: 2, 2: 1, 3: 2, 4: 1}
        for one in self.ran.summary.finished:
            if one.test.id.file == "test_2.py" and one.test.id.method != "test_5":
                devices = one.last.lease.devices
                self.assertEqual(len(devices), widths[int(one.test.id.method[5:])])
                self.assertEqual(one.last.output.strip(), ",".join(devices))
                self.assertIn(one.last.lease.node, ("a", "b"))

    def test_nothing_is_left(self):
        self.assertTrue(self.is_free)
        self.assertEqual([pid for pid in self.pids if is_alive(pid)], [])


@pytest.mark.slow
class OptionsOnNodesTest(unittest.TestCase):
    """Options of run_test.py that have their effect on the nodes."""

    def test_sanitizer_and_tests_for_pytest(self):
        source = """
            import os, pytest, unittest
            NAMES = ("TORCH_TESTING_EXT_SANITIZE", "TORCH_TESTING_EXT_SANITIZE_ORDER", "TORCH_TESTING_EXT_DELAYS")
            def show(): print(*(os.environ.get(name) for name in NAMES))
            @pytest.mark.slow
            @pytest.mark.parametrize("n", [1, 2])
            def test_item(n): show()
            class T(unittest.TestCase):
                def test_method(self): show()
                def test_fails(self): self.fail()
        """
        chosen = {"sanitize": "calls", "sanitize_order": "fail", "delays": "7", "marks": ("slow",)}
        with Nodes("a", **chosen) as nodes:
            (nodes.root / "pytest.ini").write_text("[pytest]\nmarkers = slow\naddopts = -m 'not slow'\n")
            ran = nodes.run(nodes.write(source))
        self.assertEqual(
            {name.partition("::")[2]: outcome for name, outcome in ran.by_id.items()},
            {"test_item[1]": "passed", "test_item[2]": "passed", "T::test_method": "passed", "T::test_fails": "failed"},
        )
        for name in ("test_item[1]", "test_item[2]", "test_method"):
            self.assertEqual(ran[name].output.strip(), "calls fail 7")
        self.assertIn("--delays=7", ran["test_fails"].said)


@pytest.mark.slow
class LostNodesTest(unittest.TestCase):
    """An agent ends while a test waits: the test runs again, as the same attempt."""

    def kill_agents(self, nodes, times, **options):
        """Runs a file and kills the agent whenever the first test waits, `times` times."""
        fifo, count = nodes.root / f"fifo{times}", nodes.root / f"count{times}"
        os.mkfifo(fifo)
        file = nodes.write(WAITS.format(fifo=str(fifo), count=str(count), times=times + 1))
        below, self.ended = set(), []

        def react(event):
            if isinstance(event, events.TestBegan) and event.test.id.method == "test_a_waits":
                worker = read_pid(fifo)
                if len(self.ended) < times:
                    agent = nodes.pid(event.lease.node)
                    below.update({*descendants(agent), *descendants(worker)})
                    self.ended.append(event.lease.node)
                    os.kill(agent, signal.SIGKILL)

        ran = nodes.run(file, react=react, **options)
        wait_until_gone(self, below, 10)
        self.assertGreaterEqual(len(below), 4)
        self.assertTrue(nodes.is_free)
        return ran

    def test_agents_are_killed(self):
        with Nodes("a", "b", "c", "d", jobs=1) as nodes:  # one unit on each
            with self.subTest("once"):
                ran = self.kill_agents(nodes, 1)
                self.assertEqual(ran.outcomes, {"test_a_waits": "passed", "test_b_is_fine": "passed"})
                (attempt,) = ran.attempts["test_a_waits"]
                self.assertEqual(attempt.number, 1)
                self.assertNotEqual(attempt.lease.node, self.ended[0])
                warning = next(text for text in ran.summary.warnings if "test_a_waits" in text)
                self.assertRegex(
                    warning, rf"node {self.ended[0]} was lost: .*SIGKILL.*test_a_waits.* again, as the same attempt"
                )
            with self.subTest("twice"):
                ran = self.kill_agents(nodes, 2)
                self.assertEqual(ran.outcomes, {"test_a_waits": "crashed", "test_b_is_fine": "passed"})
                self.assertEqual(len(self.ended), 2)
                for node in self.ended:
                    self.assertIn(f"node {node} was lost", ran["test_a_waits"].said)
            with self.subTest("no node is left"):
                ran = self.kill_agents(nodes, 3)
                self.assertEqual(ran.outcomes["test_a_waits"], "error")
                self.assertIn("no node is left", ran["test_a_waits"].said)
                self.assertFalse(ran.summary.interrupted)

    def test_garbage_of_an_agent(self):
        with Nodes("a") as nodes:
            (node,) = nodes.place.nodes._nodes.values()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                node._reader._fd = theirs.fileno()
                ours.send(b'{"NodeReady": {}}\n')
                node._receive()
            self.assertTrue(node.is_lost)
        self.assertIn("sent something that is not a message", nodes.said[-1])

    def test_an_agent_that_says_nothing(self):
        """It is stopped: nothing ends, and nothing comes."""
        with Nodes("a", "b") as nodes:
            agent = nodes.pid("a")
            os.kill(agent, signal.SIGSTOP)
            try:
                (node,) = (node for name, node in nodes.place.nodes._nodes.items() if name == "a")
                for _ in range(100):
                    node.tick()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGCONT)
            self.assertIn("it has not answered for", nodes.said[-1])
            file = nodes.write("import unittest\nclass T(unittest.TestCase):\n    def test_x(self): pass\n")
            self.assertEqual(nodes.run(file).outcomes, {"test_x": "passed"})


class SlowReaderTest(unittest.TestCase):
    """An agent that does not read: it is stopped, or what carries its bytes is."""

    def setUp(self):
        self.loop = JumpingLoop.of(self)
        self.nodes = ClusterNodes(CommandLauncher({}, None, None, {}), NodeLeases(), self.loop, lambda text: None)
        ours, self.theirs = socket.socketpair()
        self.addCleanup(self.theirs.close)
        self.nodes.join(JoiningNode("a", ours, prepare_for("/"), lambda: ""))
        self.node = self.nodes.remote("a")

    def test_sending_does_not_wait(self):
        """All arrives in order when it reads again."""
        self.addCleanup(self.nodes.close)
        sent = [FindTests((str(number) * 50_000,), 0, number) for number in range(20)]
        for message in sent:
            self.node.send(message)
        reader, received = MessageReader(self.theirs.fileno(), ToAgent), []
        while len(received) < 1 + len(sent):
            received += reader.receive()
        self.assertEqual(received[1:], sent)

    def test_closing_does_not_wait(self):
        for number in range(20):
            self.node.send(FindTests(("x" * 50_000,), 0, number))
        writer = self.node._writer
        self.nodes.close()
        self.assertFalse(writer._thread.is_alive())

    def test_a_second_interrupt_does_not_wait_for_it(self):
        lost = []
        listener = types.SimpleNamespace(unit_lost=lambda unit, rest, why: lost.append((rest, why)))
        self.node.run(RunUnit(Unit(7, (Test(TestId("f", "T", "x")),)), Lease(slots=(0,)), 0), listener)
        self.nodes.hurry()
        while not lost:
            self.loop.step()
        self.assertEqual(lost, [([0], "node a was lost: its units have not ended although they were killed")])


class LendingLauncher(CommandLauncher):
    """Starts nothing, and notes what becomes of nodes."""

    def __init__(self):
        super().__init__({}, None, None, {})
        self.said = []

    def release(self, name, refused=""):
        self.said.append(("refuse" if refused else "release", name))

    def take_more(self, wanted):
        self.wants_more = wanted
        return True


class StatesOfNodesTest(unittest.TestCase):
    """Nodes without processes: two sockets for each."""

    def setUp(self):
        self.loop = JumpingLoop.of(self)
        self.launcher, self.leases = LendingLauncher(), NodeLeases()
        self.nodes = ClusterNodes(self.launcher, self.leases, self.loop, lambda text: None)
        # Each node has a thread, with which later tests cannot fork.
        self.addCleanup(self.nodes.close)
        self.streams = {}
        self.nodes.open()

    def join(self, *names, ready=True):
        for name in names:
            ours, self.streams[name] = socket.socketpair()
            self.addCleanup(self.streams[name].close)
            self.streams[name].sendall(to_line(AgentHello(facts_of_machine(), 1, 0.0)))
            self.nodes.join(JoiningNode(name, ours, prepare_for("/"), lambda: ""))
            if ready:
                self.nodes.node_is_ready(self.nodes.remote(name), NodeReady(None, (), 0, False, 1, "2"))

    def run_on(self, name):
        unit = Unit(7, (Test(TestId("f", "T", "x")),))
        return self.nodes.remote(name).run(RunUnit(unit, Lease(slots=(0,)), 0), types.SimpleNamespace())

    def beat(self, times, silent=()):
        """Let so many heartbeats pass, in which all agents but the silent ones give a sign of life."""
        for _ in range(times):
            for name, stream in self.streams.items():
                if name not in silent:
                    with contextlib.suppress(OSError):  # of a node that was given back
                        stream.sendall(to_line(AgentAlive(0.0)))
            self.loop.run_for(HEARTBEAT)

    def test_a_node_that_gives_no_sign_of_life_is_lost(self):
        self.join("a", "b")
        self.beat(MOST_MISSING, silent="b")
        self.assertEqual("".join(self.nodes.ready), "ab")
        self.beat(2, silent="b")
        self.assertEqual("".join(self.nodes.ready), "a")
        self.assertIn(("release", "b"), self.launcher.said)

    def test_a_node_without_work_is_given_back(self):
        self.join("a", "b", "c", ready=True)
        self.run_on("a")
        for waiting, left in ((None, "abc"), (1, "abc"), (0, "a")):
            self.nodes.waiting = None if waiting is None else lambda count=waiting: count
            self.beat(cluster_nodes.IDLE_BEATS + 1)
            self.assertEqual("".join(self.nodes.ready), left)
        self.assertFalse(self.launcher.wants_more)
        self.assertEqual(sorted(self.launcher.said), [("release", "b"), ("release", "c")])
        self.assertEqual(self.leases.slots.total, 1)

    def test_its_files_come_first(self):
        written = []
        self.nodes.coming_back = types.SimpleNamespace(
            add=lambda node, changed: written.append((node, changed.name)), write=lambda: (["x"], [])
        )
        self.nodes.waiting = lambda: 0
        self.join("a", "b")
        self.run_on("b")
        self.beat(cluster_nodes.IDLE_BEATS + 1)
        self.assertEqual((list(self.nodes.ready), self.launcher.said), (["b"], []))
        self.streams["a"].sendall(to_line(FileChanged("x", "", b"")) + to_line(AllFilesSent()))
        while not self.launcher.said:
            self.loop.step()
        self.assertEqual((written, self.launcher.said), ([("a", "x")], [("release", "a")]))
        self.nodes.remote("b")._units.clear()
        self.assertTrue(self.nodes.are_sending())
        self.nodes.remote("b").lose("its agent has ended")  # nothing is awaited from it any more
        self.assertFalse(self.nodes.are_sending())

    def test_a_node_with_other_software_is_left_alone(self):
        self.join("a")
        self.join("b", ready=False)
        other = AgentHello(replace(facts_of_machine(), torch="1.0"), 1, 0.0)
        self.nodes.node_said_hello(self.nodes.remote("b"), other)
        self.assertEqual(list(self.nodes.ready), ["a"])
        self.assertEqual(self.launcher.said[0], ("refuse", "b"))
        (warning,) = self.nodes.troubles.warnings
        self.assertIn("node b has different software than this machine, so it is not used:\n  b: torch is 1.0", warning)
        self.assertIn("b: torch is 1.0, here", self.nodes.troubles.why_none("no node is left"))

    def test_drained_while_it_starts(self):
        self.join("a", ready=False)
        self.nodes.drain("a")
        self.nodes.node_is_ready(self.nodes.remote("a"), NodeReady(None, (), 0, False, 1, "2"))
        self.assertEqual(self.leases.slots.total, 0)
        self.beat(1)
        self.assertEqual(len(self.nodes), 0)


class InterruptedTest(unittest.TestCase):
    def interrupt(self, times):
        with Nodes("a") as nodes:
            fifo = nodes.root / "fifo"
            os.mkfifo(fifo)
            file = nodes.write(WAITS.format(fifo=str(fifo), count=str(nodes.root / "count"), times=9))
            below = set()

            def react(event):
                if isinstance(event, events.TestBegan) and event.test.id.method == "test_a_waits":
                    worker = read_pid(fifo)
                    below.update({worker, *descendants(worker)})
                    for _ in range(times):
                        engine_interrupts()

            def engine_interrupts():
                os.kill(os.getpid(), signal.SIGINT)

            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                ran = nodes.run(file, react=react, jobs=1)
            finally:
                signal.signal(signal.SIGINT, before)
            self.assertEqual([pid for pid in below if is_alive(pid)], [])
            self.assertTrue(nodes.is_free)
        self.assertTrue(ran.summary.interrupted)
        self.assertIn("test_a_waits", [test.id.method for test in ran.summary.unfinished])

    @pytest.mark.slow
    def test_once(self):
        self.interrupt(1)

    def test_twice(self):
        self.interrupt(2)


class StreamTest(unittest.TestCase):
    """An agent alone, on a socket."""

    def setUp(self):
        self.nodes = Nodes()
        self.addCleanup(self.nodes.__exit__)
        self.root = self.nodes.root
        self.errors = self.root / "errors"

    def start(self, cold=False):
        ours, theirs = socket.socketpair()
        self.addCleanup(ours.close)
        with theirs, self.errors.open("wb") as errors:
            if cold:
                self.agent = subprocess.Popen(
                    AGENT, stdin=theirs, stdout=theirs, stderr=errors, env=clean_environ(), start_new_session=True
                )
            else:
                self.agent = start_agent(theirs, errors, clean_environ())
        self.addCleanup(self.agent.wait)
        self.addCleanup(self.agent.kill)
        self.stream = ours
        self.reader = MessageReader(ours.fileno(), FromAgent)
        self.received = []
        return self.wait_for(AgentHello)

    def wait_for(self, kind):
        while True:
            for message in self.received:
                if isinstance(message, kind):
                    return message
            self.received += self.reader.receive()

    def start_waiting_unit(self):
        """The agent runs a unit that waits. Returns the pids below the agent."""
        self.start(cold=True)  # its preloaded server is its child
        self.stream.sendall(to_line(prepare_for(self.root)))
        self.wait_for(NodeReady)
        fifo = self.root / "fifo"
        os.mkfifo(fifo)
        file = self.nodes.write(WAITS.format(fifo=str(fifo), count=str(self.root / "count"), times=9))
        test = Test(TestId(file, "T", "test_a_waits"))
        self.stream.sendall(to_line(RunUnit(Unit(7, (test,)), Lease(slots=(0,)), 0)))
        self.wait_for(BeganInUnit)
        worker = read_pid(fifo)
        pids = {*descendants(self.agent.pid), *descendants(worker)}
        self.assertIn(worker, pids)
        self.assertGreaterEqual(len(pids), 5)  # preloaded server, file, supervisor, worker, helper
        return pids

    def test_hello(self):
        hello = self.start()
        self.assertEqual(hello.facts, facts_of_machine())
        self.assertEqual(hello.pid, self.agent.pid)

    @pytest.mark.slow
    def test_the_stream_ends_while_a_test_runs(self):
        pids = self.start_waiting_unit()
        self.stream.close()
        wait_until_gone(self, {*pids, self.agent.pid}, 2)
        self.assertEqual(self.agent.wait(), 0)

    def test_the_stream_ends_before_torch_is_imported(self):
        self.start(cold=True)
        self.stream.sendall(to_line(prepare_for(self.root)))
        while not (pids := descendants(self.agent.pid)):
            self.received += self.reader.receive()  # signs of life
        self.stream.close()
        wait_until_gone(self, {*pids, self.agent.pid}, 2)

    def test_the_agent_is_killed(self):
        pids = self.start_waiting_unit()
        self.agent.kill()
        wait_until_gone(self, pids, 2)

    def test_the_agent_is_terminated(self):
        pids = self.start_waiting_unit()
        self.agent.terminate()
        wait_until_gone(self, pids, 2)

    @pytest.mark.slow
    def test_garbage_while_a_test_runs(self):
        pids = self.start_waiting_unit()
        self.stream.sendall(b"\xff\xfe{}\n")
        wait_until_gone(self, {*pids, self.agent.pid}, 4)
        self.assertEqual(self.agent.wait(), 1)
        self.assertIn("is not a message", self.errors.read_text())

    @pytest.mark.slow
    def test_garbage_at_the_start(self):
        for garbage in (b"hello\n", b"{}\n", b'{"RunUnit": 3}\n', b"[]\n", b'{"PrepareNode": {"root": "/"}}\n'):
            with self.subTest(garbage=garbage):
                self.start()
                self.stream.sendall(garbage)
                self.assertEqual(self.agent.wait(), 1)
                self.assertIn("is not a message", self.errors.read_text())

    @pytest.mark.slow
    def test_a_unit_of_a_file_that_is_not_there(self):
        """Not an error of the agent: the unit fails."""
        with Nodes("a") as nodes:
            file = nodes.write("import unittest\nclass T(unittest.TestCase):\n    def test_x(self): pass\n")
            found = nodes.place.find_tests((file,), 1)
            nodes.place.close_file(file)
            (nodes.root / file).unlink()
            nodes.place.find_tests = lambda files, jobs: found
            ran = nodes.run(file)
        self.assertEqual(ran.outcomes, {"test_x": "error"})
        self.assertIn("No such file", ran["test_x"].said)


class LinesTest(unittest.TestCase):
    def read(self, *data, **more):
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        reader = MessageReader(reading, FromAgent, **more)
        received = []
        for part in data:
            os.write(writing, part)
            received += reader.receive()
        os.close(writing)
        self.assertRaises(EOFError, reader.receive)
        return received, reader

    HELLO = AgentHello(replace(facts_of_machine(), platform="ä"), 1, 2.5)

    def test_pieces(self):
        line = to_line(self.HELLO)
        received, _ = self.read(line[:5], line[5:20], line[20:] + line + line[:3], line[3:])
        self.assertEqual(received, [self.HELLO] * 3)

    def test_what_a_login_shell_prints(self):
        received, reader = self.read(b"Welcome!\n{}\n", to_line(self.HELLO), first=AgentHello)
        self.assertEqual(received, [self.HELLO])
        self.assertEqual(reader.ignored, ["Welcome!", "{}"])
        with self.assertRaises(NotAMessage):
            self.read(to_line(self.HELLO) + b"Bye!\n", first=AgentHello)


class BeforeTheRunTest(unittest.TestCase):
    def refuse(self, *names, **more):
        nodes = Nodes(*names, **more)
        with self.assertRaises(ClusterError) as caught, nodes:
            pass
        self.assertEqual(nodes.launcher._processes, {})
        return str(caught.exception), nodes.said

    def test_other_software(self):
        code = (
            "from dataclasses import replace\n"
            "from torch_testing_ext.runner.cluster import agent, node_environment\n"
            "real = node_environment.facts_of_machine()\n"
            "other = replace(real, torch='1.0', cuda='99')\n"
            "agent.facts_of_machine = node_environment.facts_of_machine = lambda: other\n"
            "agent.main()\n"
        )
        message, _ = self.refuse("a", command=(AGENT[0], "-c", code))
        self.assertIn(f"a: torch is 1.0, here {facts_of_machine().torch}", message)
        self.assertIn("a: CUDA or ROCm of torch is 99, here", message)
        self.assertNotIn("Python", message.partition("\n")[2].partition("Install")[0])

    def test_an_agent_that_cannot_start(self):
        message, said = self.refuse("a", command=("sh", "-c", "echo no such module >&2; exit 3"))
        self.assertIn("no node is left", message)
        self.assertIn("node a was lost: its agent exited with code 3: no such module", said)


if __name__ == "__main__":
    run_tests()
