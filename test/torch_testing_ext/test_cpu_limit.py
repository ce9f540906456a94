"""A run with a limit names the tests that cost more CPU, and fails."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.files import subject

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
PROGRAM = subject(__file__, "costly_programs.py")
CONFTEST = f"""\
import sys
sys.path.append({str(ROOT / "test")!r})
from cpu_limit import pytest_addoption, start_measuring

def pytest_configure(config):
    start_measuring(config)
"""


COSTLY = """\
import time

def test_cheap(): pass

def test_costly():
    end = time.process_time() + 0.5
    while time.process_time() < end: pass
"""


class CpuLimitTest(unittest.TestCase):
    def run_program(self, *words, program=PROGRAM, environ=None):
        """The exit code of pytest, the seconds of each test that it lists, and all that it says."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_it.py").write_text(program)
            Path(folder, "conftest.py").write_text(CONFTEST)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "test_it.py"]
            environ = {**os.environ, **(environ or {})}
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        rows = re.findall(r"(?m)^ *([\d.]+)s test_it.py::(?:\w+::)?test_(\w+)$", done.stdout)
        return done.returncode, {name: float(seconds) for seconds, name in rows}, done.stdout

    @pytest.mark.slow
    def test_what_a_test_costs(self):
        code, seconds, text = self.run_program("-p", "no:xdist", "--cpu-limit=100")
        self.assertEqual(code, 0, text)
        for name in ("itself", "child", "orphan_computes"):
            with self.subTest(name):
                self.assertGreaterEqual(seconds[name], 0.35)
        for name in ("nothing", "waits", "orphan", "starts_a_server"):
            with self.subTest(name):
                self.assertLess(seconds.get(name, 0.0), 0.3)
        self.assertNotIn("imports", seconds)

    def test_tests_share_what_their_class_costs(self):
        _, seconds, text = self.run_program("-p", "no:xdist", "--cpu-limit=100", "-k", "Sharing")
        self.assertEqual(seconds.keys(), {"a", "b", "c"}, text)
        for name in seconds:
            self.assertAlmostEqual(seconds[name], 0.3, delta=0.15)

    @pytest.mark.slow
    def test_a_costly_test_fails_the_run(self):
        for words, environ in (
            (("-p", "no:xdist", "--cpu-limit=0.2"), {}),
            (("-n", "1", "--cpu-limit=0.2"), {}),
            (("-p", "no:xdist"), {"CI_CPU_LIMIT": "0.2"}),
        ):
            with self.subTest(words):
                code, seconds, text = self.run_program(*words, program=COSTLY, environ=environ)
                self.assertEqual((code, seconds.keys()), (1, {"cheap", "costly"}), text)
                self.assertIn("1 tests cost more than 0.4 s of CPU. Make them cheaper than 0.2 s", text)
        code, _, text = self.run_program("-p", "no:xdist", "--cpu-limit=0.4", program=COSTLY)
        self.assertEqual(code, 0, text)

    def test_without_a_limit_nothing_is_measured(self):
        code, seconds, _ = self.run_program("-p", "no:xdist", program="def test_a(): pass\n")
        self.assertEqual((code, seconds), (0, {}))


class CommandsTest(unittest.TestCase):
    def test_the_three_commands_run_everything(self):
        pages = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
        command = r"<!-- command: {} -->\n```\n.*\.venv/bin/python -m pytest -n \d --dist worksteal -m (.*)\n"
        found = [re.findall(command.format(name), pages) for name in ("test", "slow", "nightly")]
        self.assertEqual(found, [["'not slow'"], ["'slow and not nightly'"], ["nightly"]])


if __name__ == "__main__":
    unittest.main()
