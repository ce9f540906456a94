"""Tests that use fixed ports: found by their sources or by a failure, and run one after the other."""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from kit.invented import make_test

from torch_testing_ext.runner.model import Attempt, TestOutcome, Unit
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.policy import Queue
from torch_testing_ext.runner.selection.ports import fixed_ports, is_collision, notes_on_ports, ports_in_use

ROOT = Path(__file__).resolve().parents[3]
NAMED = [
    ('os.environ["MASTER_PORT"] = "29500"', {29500}),
    ("os.environ['MASTER_PORT'] = str(29500)", {29500}),
    ('os.environ.setdefault("MASTER_PORT", "29501")', {29501}),
    ('monkeypatch.setenv("MASTER_PORT", "29501")', {29501}),
    ('port = os.environ.get("MASTER_PORT", "29501")', {29501}),
    ('os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "29502"})', {29502}),
    ('mock.patch.dict(os.environ, MASTER_PORT="29503")', {29503}),
    ('MASTER_PORT = "29500"', {29500}),
    ("PORT: int = 12355", {12355}),
    ("class T:\n    port = 12355\n", {12355}),
    ("def run(rank, port=6789): pass", {6789}),
    ("def run(rank, *, master_port='6789'): pass", {6789}),
    ('dist.init_process_group("gloo", init_method="tcp://localhost:12345", rank=0)', {12345}),
    ('dist.init_process_group("gloo", init_method=f"tcp://{HOST}:12345")', {12345}),
    ('ADDRESS = 23456\nurl = f"tcp://127.0.0.1:{ADDRESS}"', {23456}),
    ('BASE = 23456\nurl = "tcp://127.0.0.1:" + str(BASE)', {23456}),
    ('TCPStore("localhost", 29501, 2)', {29501}),
    ('N = 29501\nstore = dist.TCPStore("localhost", N, 2, is_master=True)', {29501}),
    ('dist.TCPStore(host_name="localhost", port=29501)', {29501}),
    ('s.bind(("", 8765))', {8765}),
    ('endpoint = "localhost:29400"', {29400}),
    ("base_port = 20000 + rank", {20000}),
    ("ports = [20000, 20001]", {20000, 20001}),
    ("MASTER_PORT = 29500\nos.environ['MASTER_PORT'] = str(MASTER_PORT + 1)", {29500}),
]
NOT_NAMED = [
    'os.environ["MASTER_PORT"] = str(find_free_port())',
    'os.environ["MASTER_PORT"] = "0"',
    "port = 0",
    "port = find_free_port()",
    'TCPStore("localhost", 0, 2)',
    'dist.init_process_group("gloo", init_method=f"tcp://localhost:{find_free_port()}")',
    's.bind(("", 0))',
    "import os\nsupport = 5000\nreport = 6000\nimported_from = 7000\nexport_size = 12345",
    '"""A server on localhost:8080, tcp://localhost:12345."""',
    "# MASTER_PORT = 29500",
    "port = True",
    "def broken(:\n    port = 29500",
    'text = "see http://example.org:8080"',
]


class SourceTest(unittest.TestCase):
    def test_named(self):
        for source, ports in NAMED:
            with self.subTest(source=source):
                self.assertEqual(fixed_ports(source), ports)

    def test_not_named(self):
        for source in NOT_NAMED:
            with self.subTest(source=source):
                self.assertEqual(fixed_ports(source), frozenset())


class FailureTest(unittest.TestCase):
    def attempt(self, message):
        return Attempt(make_test("test"), TestOutcome.ERROR, message)

    def test_in_use(self):
        for message, ports in (
            (
                "The server socket has failed to listen. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE",
                {29500},
            ),
            ("OSError: [Errno 98] Address already in use", set()),
            ("error while attempting to bind on address ('127.0.0.1', 8765): address already in use", {8765}),
        ):
            with self.subTest(message=message):
                self.assertTrue(is_collision(self.attempt(f"rank 0 raised: {message}\n\nline 4")))
                self.assertEqual(ports_in_use(self.attempt(f"rank 0 raised: {message}\n\nline 4")), ports)
        self.assertFalse(is_collision(self.attempt("Connection refused, port: 29500")))


def unit(number, *ports, file="test_a.py", alone=False, seconds=None):
    test = make_test(f"test_{number}", file=file, ports=ports)
    return Unit(number, (test,), alone=alone, seconds=seconds)


class ScheduleTest(unittest.TestCase):
    def schedule(self, *units, slots=4):
        self.leases = Leases((), slots)
        self.queue = Queue(units, 0, slots, may_run_now=self.leases.may_run_now)

    def begin(self):
        """Start what fits; return the leases by unit."""
        began = {}
        while (taken := self.queue.take(0, self.leases.free_slots)) is not None:
            began[taken.number] = self.leases.take(taken)
        return began

    def test_a_common_port(self):
        self.schedule(unit(1, 29500), unit(2, 29500, 29501), unit(3, 29501, file="test_b.py"), unit(4), unit(5, 7))
        began = self.begin()
        self.assertEqual(sorted(began), [1, 3, 4, 5])
        self.leases.give_back(began[1])
        self.assertEqual(self.begin(), {})
        self.leases.give_back(began[3])
        self.assertEqual(list(self.begin()), [2])

    def test_a_port_holds_up_no_other_unit(self):
        self.schedule(*(unit(n, 29500) for n in range(3)), *(unit(n) for n in range(3, 60)), slots=2)
        began = self.begin()
        holder = began.pop(0)
        others = []
        while began:
            others += began
            for lease in began.values():
                self.leases.give_back(lease)
            began = self.begin()
        self.assertEqual(others, list(range(3, 60)))
        self.leases.give_back(holder)
        self.assertEqual(list(self.begin()), [1])

    def test_alone(self):
        self.schedule(unit(1, alone=True), unit(2), unit(3))
        began = self.begin()
        self.assertEqual(list(began), [1])
        self.leases.give_back(began[1])
        self.assertEqual(list(self.begin()), [2, 3])

    def test_alone_waits_for_all(self):
        self.schedule(unit(1), unit(2, alone=True, seconds=0.1))
        began = self.begin()
        self.queue.add(unit(3))
        self.assertEqual(len(began), 1)

    def test_learned(self):
        self.schedule(unit(1), unit(2), unit(3, 29500, file="test_b.py"))
        self.leases.learn_ports("test_a.py", frozenset({29500}))
        self.assertEqual(list(self.begin()), [1])

    def test_what_the_user_is_told(self):
        units = [unit(1, 29500), unit(2, 29500), unit(3, 29500, file="test_b.py"), unit(4, 7, file="test_c.py")]
        self.assertEqual(
            list(notes_on_ports(units)),
            ["test_a.py, test_b.py: the tests run one after the other, because the source names the fixed port 29500"],
        )


NAMES = """
import socket, time, unittest
PORT = {port}

class T(unittest.TestCase):
    def listen(self):
        with socket.socket() as server:
            server.bind(("localhost", PORT))
            server.listen()
            time.sleep(0.2)

    test_1 = test_2 = listen
"""
HIDES = """
import os, socket, time, unittest
from pathlib import Path

holds, failed = Path("holds"), Path("failed")

def wait_for(path):
    while not path.exists():
        time.sleep(0.001)

class T(unittest.TestCase):
    def bind(self):
        server = socket.socket()
        self.addCleanup(server.close)
        server.bind(("localhost", int(os.environ["HIDDEN"])))
        server.listen()

    def test_first(self):
        self.bind()
        holds.touch()
        wait_for(failed)

    def test_second(self):
        wait_for(holds)
        try:
            self.bind()
        except OSError:
            failed.touch()
            raise
"""
ALWAYS = """
import unittest

class T(unittest.TestCase):
    def test(self):
        raise OSError(98, "Address already in use")
"""


class RunTest(unittest.TestCase):
    def run_files(self, *words, **files):
        """Run these files at once; return the exit code, what was printed and the results."""
        with tempfile.TemporaryDirectory() as temporary, socket.socket() as free:
            directory = Path(temporary).resolve()
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
            free.close()
            for name, source in files.items():
                (directory / f"{name}.py").write_text(source.replace("{port}", str(port)))
            command = [sys.executable, str(ROOT / "run_test.py"), "--cache", "cache", "--drop-in", ".", "-j", "4"]
            done = subprocess.run(
                [*command, "--results", "results.json", *words],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), "HIDDEN": str(port)},
                capture_output=True,
                text=True,
            )
            results = json.loads((directory / "results.json").read_text())
        return done.returncode, done.stdout + done.stderr, {one["id"]: one for one in results["tests"]}

    def test_a_port_in_two_sources(self):
        code, said, results = self.run_files(test_a=NAMES, test_b=NAMES)
        self.assertEqual((code, [one["outcome"] for one in results.values()]), (0, ["passed"] * 4), said)
        spans = sorted((one["attempts"][0]["began"], one["seconds"]) for one in results.values())
        for (began, seconds), (after, _) in itertools.pairwise(spans):
            self.assertLessEqual(began + seconds, after)
        self.assertIn("test_a.py, test_b.py: the tests run one after the other, because the source names", said)

    def test_a_port_in_use_is_retried_alone(self):
        code, said, results = self.run_files(test_a=HIDES)
        first, second = (results[f"test_a.py::T::test_{name}"] for name in ("first", "second"))
        self.assertEqual((code, first["outcome"], second["outcome"]), (0, "passed", "flaky"), said)
        self.assertEqual([one["outcome"] for one in second["attempts"]], ["error", "passed"])
        self.assertIn("test_a.py::T::test_second: a port was in use (EADDRINUSE); the test runs again while no", said)

    def test_one_that_is_in_use_even_alone(self):
        code, said, results = self.run_files(test_a=ALWAYS)
        self.assertEqual((code, results["test_a.py::T::test"]["outcome"]), (1, "error"), said)
        self.assertEqual(len(results["test_a.py::T::test"]["attempts"]), 2)


if __name__ == "__main__":
    unittest.main()
