"""The files of examples/ run, and each says in two lines what it shows and how to run it."""

import ast
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch_testing_ext
from torch_testing_ext.launch import environment

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


class ExamplesTest(unittest.TestCase):
    def test_all_pass(self):
        """In one run, by the command of examples/README.md."""
        command = "python run_test.py -o tests=examples"
        self.assertIn(f"\n{command}\n", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(environment.PREFIX)}
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.json")
            words = [sys.executable, *command.split()[1:], "--cache", folder, "--results", results]
            done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            tests = json.loads(results.read_text())["tests"]
        self.assertEqual({test["outcome"] for test in tests}, {"passed"})
        names = {file.name for file in EXAMPLES}
        self.assertEqual({Path(test["file"]).name for test in tests}, names - {"train.py"})

    def test_each_says_what_it_shows_and_how_to_run_it(self):
        page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
        for file in EXAMPLES:
            with self.subTest(file=file.name):
                self.assertIn(f"[{file.name}]({file.name})", page)
                docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
                self.assertRegex(docstring, rf"\A.+\n\nRun it: (python|torchrun) .*examples/{file.name}\Z")


if __name__ == "__main__":
    unittest.main()
