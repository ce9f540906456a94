"""The header of the reports: where a run took place, with which software, and from which commit."""

import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.files import subject
from kit.junit import read_junit
from kit.runs import run_test

import torch_testing_ext
from torch_testing_ext._machine.device_needs import DeviceFacts
from torch_testing_ext.runner.run_header import CommitQuery, describe_devices
from torch_testing_ext.runner.scheduling.inventory import Inventory

ROOT = Path(torch_testing_ext.__file__).parents[1]
AUTHOR = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
LONG = subject(__file__, "long_run.py")


def git(folder, *words):
    command = ["git", "-C", str(folder), *AUTHOR, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class CommitTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def repository(self):
        git(self.folder, "init", "-q")
        Path(self.folder, "a").write_text("1")
        git(self.folder, "add", "a")
        git(self.folder, "commit", "-q", "-m", "one")
        return git(self.folder, "rev-parse", "HEAD")

    def answer(self, folder=None, **environ):
        with CommitQuery(folder or self.folder, {**os.environ, **environ}) as query:
            return query.answer()

    def test_a_commit(self):
        commit = self.repository()
        self.assertEqual(self.answer(), (commit, False))
        Path(self.folder, "untracked").touch()
        Path(self.folder, "below").mkdir()
        self.assertEqual(self.answer(self.folder / "below"), (commit, False))
        Path(self.folder, "a").write_text("2")
        self.assertEqual(self.answer(), (commit, True))

    def test_a_tag_is_not_a_commit(self):
        commit = self.repository()
        git(self.folder, "tag", "-a", "-m", "x", "v1-dirty")
        self.assertEqual(self.answer(), (commit, False))

    def test_no_repository(self):
        self.assertEqual(self.answer(GIT_CEILING_DIRECTORIES=str(self.folder.parent)), ("", False))

    def test_no_commit_yet(self):
        git(self.folder, "init", "-q")
        self.assertEqual(self.answer(), ("", False))

    def test_no_git(self):
        self.assertEqual(self.answer(PATH=str(self.folder)), ("", False))

    def test_a_git_that_hangs(self):
        program = self.folder / "git"
        program.write_text("#!/bin/sh\nexec sleep 1000\n")
        program.chmod(0o700)
        with CommitQuery(self.folder, {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}, 0.0) as query:
            self.assertEqual(query.answer(), ("", False))
            process = query._git
        self.assertEqual(process.returncode, -9)


class DevicesTest(unittest.TestCase):
    def test_words(self):
        two = Inventory(("0", "GPU-7"), "cuda")
        for inventory, models, expected in (
            (Inventory(), {}, "none (CPU only)"),
            (Inventory((), "cuda"), {"H100": 8}, "none (CPU only)"),
            (Inventory(("3",), "xpu"), {}, "1 xpu device: 3"),
            (Inventory(("3",), "xpu"), {"Max 1550": 8}, "1 xpu device: 3 (Max 1550)"),
            (Inventory(("0", "1"), "cuda", fake=True), {"H100": 8}, "2 fake devices: 0, 1"),
            (two, {}, "2 cuda devices: 0, GPU-7"),
            (two, {"H100": 8}, "2 cuda devices: 0, GPU-7 (H100)"),
            (two, {"H100": 1, "T4": 2}, "2 cuda devices: 0, GPU-7 (of 1 x H100, 2 x T4)"),
        ):
            with self.subTest(inventory=inventory):
                facts = tuple(DeviceFacts(name) for name, number in models.items() for _ in range(number))
                self.assertEqual(describe_devices(replace(inventory, facts=facts)), expected)


@pytest.mark.slow
class RunTest(unittest.TestCase):
    def test_all_reports_have_it(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copy(ROOT / "run_test.py", folder)
            (folder / "test_a.py").write_text(
                "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): pass\n"
            )
            reports = [f"--{kind}={kind}" for kind in ("junitxml", "html", "results")]
            # A run in CI uses no warm server, of which the header would tell.
            environ = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "CI": "true"}
            ran = run_test(folder, "-otests=.", "--gpus=none", *reports, **environ)
            self.assertEqual(ran.code, 0, ran.console + ran.complaints)
            expected = {
                "command": shlex.join([sys.executable, "run_test.py", "-otests=.", "--gpus=none", *reports]),
                "commit": "",
                "uncommitted_changes": False,
                "host": socket.gethostname(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "devices": "none (CPU only)",
                "facts": {},
            }
            self.assertEqual(json.loads(ran.report("results"))["header"], expected)
            suite = read_junit(ran.report("junitxml"))[0]
            properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
            shown = [expected[name] for name in ("command", "host", "torch", "python", "devices")]
            self.assertEqual(list(properties.values()), shown)
            for value in shown:
                self.assertIn(value, ran.report("html"))

    def test_a_message_of_a_million_characters_is_whole_in_the_files(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copy(ROOT / "run_test.py", folder)
            (folder / "test_a.py").write_text(LONG)
            reports = [f"--{kind}={kind}" for kind in ("junitxml", "html", "results")]
            ran = run_test(folder, "-otests=.", "--gpus=none", *reports)
            self.assertEqual(ran.code, 1, ran.console + ran.complaints)
            tests = json.loads(ran.report("results"))["tests"]
            messages = {one["id"].split("::")[1]: one["attempts"][0]["message"] for one in tests}
            in_xml = {
                case.get("name"): case.find("failure").text
                for case in read_junit(ran.report("junitxml")).iter("testcase")
            }
            for cls, method, letter in ("Alone", "test_a", "x"), ("OnRanks", "test_b", "y"):
                whole = f"begin {letter * 1_000_000} end"
                self.assertIn(whole, messages[cls])
                self.assertIn(whole, in_xml[method])
                self.assertIn(whole, ran.report("html"))
                self.assertNotIn(letter * 2_000, ran.console)
                self.assertEqual(messages[cls].count("-- full report --"), 1)
                self.assertIn(f"details:    python run_test.py show test_a.py::{cls}::{method}", ran.console)


if __name__ == "__main__":
    unittest.main()
