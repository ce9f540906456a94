"""Tests that find a port in use run once more, while no other test runs."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.files import subject
from kit.invented import make_test

from torch_testing_ext.runner.model import Unit
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.unit_queue import Queue

ROOT = Path(__file__).resolve().parents[3]


def unit(number, alone=False, seconds=None):
    return Unit(number, (make_test(f"test_{number}"),), alone=alone, seconds=seconds)


class ScheduleTest(unittest.TestCase):
    def schedule(self, *units, slots=4):
        self.leases = Leases((), slots)
        self.queue = Queue(units, self.leases)

    def begin(self):
        """Start what fits; return the leases by unit."""
        began = {}
        while (taken := self.queue.take(0, self.leases.free_slots)) is not None:
            began[taken.number] = self.leases.take(taken)
        return began

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


HIDES = subject(__file__, "hidden_ports.py")
ALWAYS = """
import unittest

class T(unittest.TestCase):
    def test(self):
        raise OSError(98, "Address already in use")
"""
SKIPS_ALONE = """
import pathlib, unittest

class T(unittest.TestCase):
    def test(self):
        if pathlib.Path("ran").exists():
            self.skipTest("it needs another backend")
        pathlib.Path("ran").touch()
        print("bind: Address already in use")
        raise RuntimeError("cannot listen")
"""
# Nothing is printed: the exception alone tells it, or that of a rank, in words of another language.
FIRST_TIME = subject(__file__, "port_in_use_once.py")


@pytest.mark.slow
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

    def test_a_port_in_use_is_retried_alone(self):
        code, said, results = self.run_files(test_a=HIDES)
        first, second = (results[f"test_a.py::T::test_{name}"] for name in ("first", "second"))
        self.assertEqual((code, first["outcome"], second["outcome"]), (0, "passed", "flaky"), said)
        self.assertEqual([one["outcome"] for one in second["attempts"]], ["error", "passed"])
        self.assertIn("test_a.py::T::test_second: a port was in use (EADDRINUSE); the test runs again alone", said)

    def test_the_exception_tells_it(self):
        code, said, results = self.run_files("-oloader=pytest", test_a=FIRST_TIME)
        self.assertEqual({one["outcome"] for one in results.values()}, {"flaky"}, said)
        self.assertEqual((code, len(results)), (0, 3), said)
        for test in results:
            self.assertIn(f"{test}: a port was in use (EADDRINUSE)", said)

    def test_one_that_skips_alone(self):
        """Nobody else's port has made it fail, so it is skipped, as where files run one after another."""
        code, said, results = self.run_files(test_a=SKIPS_ALONE)
        skipped = results["test_a.py::T::test"]
        self.assertEqual((code, skipped["outcome"]), (0, "skipped"), said)
        self.assertEqual([one["outcome"] for one in skipped["attempts"]], ["error", "skipped"])
        self.assertIn("0 passed, 0 failed, 1 skipped", said)

    def test_one_that_is_in_use_even_alone(self):
        code, said, results = self.run_files(test_a=ALWAYS)
        self.assertEqual((code, results["test_a.py::T::test"]["outcome"]), (1, "error"), said)
        self.assertEqual(len(results["test_a.py::T::test"]["attempts"]), 2)


if __name__ == "__main__":
    unittest.main()
