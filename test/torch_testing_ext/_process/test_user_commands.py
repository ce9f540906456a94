"""The words of printed commands: each form is run by a shell in the folder for which it was written."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from kit.processes import output_of_python

import torch_testing_ext
from torch_testing_ext._process import early_threads, user_commands

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]


class ProgramTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)

    def script(self, name, code):
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{code}\n")
        file.chmod(0o755)
        return file

    def said(self, path, executable, argv0="pytest"):
        with (
            mock.patch.dict(os.environ, PATH=str(path)),
            mock.patch.object(sys, "executable", str(executable)),
            mock.patch.object(sys, "argv", [str(argv0)]),
        ):
            command = user_commands.runner()
            done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
            return command, done.stdout.strip() or done.stderr

    def test_the_interpreter(self):
        """`python` only if the shell then starts this one; every command is run, and the right script answers."""
        self.script("active/bin/python", 'echo "active $*"')
        self.script("threes/bin/python3", 'echo "threes $*"')
        self.script("other/bin/python", 'echo "other $*"')
        self.script("my env/bin/python", 'echo "odd $*"')
        ours = "-m torch_testing_ext"
        for path, name, expected in (
            ("active/bin", "active/bin/python", ("python", "active")),
            ("active/bin", "active/bin/python3.11", ("python", "active")),
            ("threes/bin", "threes/bin/python3", ("python3", "threes")),
            ("other/bin", "active/bin/python", ("active/bin/python", "active")),
            ("nowhere", "active/bin/python", ("active/bin/python", "active")),
            ("nowhere", "my env/bin/python", ("'my env/bin/python'", "odd")),
        ):
            with self.subTest(path=path, name=name):
                said = self.said(self.folder / path, self.folder / name)
                self.assertEqual(said, (f"{expected[0]} {ours}", f"{expected[1]} {ours}"))
        os.chdir("other")
        away = self.said("", self.folder / "active/bin/python")
        self.assertEqual(away, (f"{self.folder}/active/bin/python {ours}", f"active {ours}"))

    def test_the_runner(self):
        python = self.script("bin/python", 'echo "python $*"')
        script = self.script("bin/torchtest", "echo torchtest")
        here = self.script("torchtest", "echo here")
        path = self.folder / "bin"
        for argv0, expected in (
            (script, ("torchtest", "torchtest")),
            (here, ("./torchtest", "here")),
            ("./torchtest", ("./torchtest", "here")),
            ("run_test.py", ("python run_test.py", "python run_test.py")),
            (self.folder / "tools/run_test.py", ("python tools/run_test.py", "python tools/run_test.py")),
            ("/elsewhere/my tests.py", ("python '/elsewhere/my tests.py'", "python /elsewhere/my tests.py")),
            (ROOT / "torch_testing_ext/__main__.py", ("python -m torch_testing_ext",) * 2),
            ("/usr/bin/pytest", ("python -m torch_testing_ext",) * 2),
        ):
            with self.subTest(argv0=argv0):
                self.assertEqual(self.said(path, python, argv0), expected)

    def test_extras_are_those_of_the_package(self):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extra, packages in user_commands.EXTRAS.items():
            listed = re.search(rf"(?m)^{extra} = \[(.*)\]$", text)[1]
            self.assertEqual(listed, ", ".join(f'"{one}"' for one in packages))
            self.assertRegex(user_commands.install(extra), " -m pip install '[a-z-]+>=")


class EarlyThreadsTest(unittest.TestCase):
    def test_a_thread_that_is_there_before_the_package(self):
        """A new interpreter: sitecustomize runs before everything else."""
        thread = "threading.Thread(target=threading.Event().wait, name='monitor', daemon=True)"
        code = "from torch_testing_ext._process import early_threads; print(early_threads.explain_early_threads())"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "sitecustomize.py")
            file.write_text(f"import threading\n{thread}.start()\n")
            printed = output_of_python("-c", code, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
            self.assertIn(f"threads were there already: monitor. {file}, a .pth file or a plugin starts them", printed)
            self.assertIn("each rank in a new interpreter: torchrun --nproc-per-node=N -m pytest FILE", printed)

    def test_no_thread(self):
        self.assertEqual(early_threads.explain_early_threads(), "")


if __name__ == "__main__":
    unittest.main()
