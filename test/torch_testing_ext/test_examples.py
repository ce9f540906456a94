"""The files of examples/ run, and each says in two lines what it shows and how to run it."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
import yaml

import torch_testing_ext
from torch_testing_ext._process import setting_names
from torch_testing_ext.runner.options import sources

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
JOBS = sorted(file for file in (ROOT / "examples" / "cookbook").iterdir() if file.suffix in (".yml", ".sh"))
# Packages that are not ours, by the example that needs them.
NEEDED = {"test_hugging_face": ("transformers", "accelerate"), "test_torchtitan": ("torchtitan",)}


class ExamplesTest(unittest.TestCase):
    @pytest.mark.slow
    def test_all_pass(self):
        """In one run, by the command of examples/README.md."""
        command = "python run_test.py -o tests=examples"
        self.assertIn(f"\n{command}\n", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(setting_names.PREFIX)}
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.json")
            words = [sys.executable, *command.split()[1:], "--cache", folder, "--results", results]
            done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            tests = json.loads(results.read_text())["tests"]
        missing = [name for name, needed in NEEDED.items() if not all(map(importlib.util.find_spec, needed))]
        others = [test for test in tests if Path(test["file"]).stem not in missing]
        self.assertEqual({test["outcome"] for test in others}, {"passed"})
        self.assertEqual({test["outcome"] for test in tests if test not in others} - {"skipped"}, set())
        names = {file.name for file in EXAMPLES}
        self.assertEqual({Path(test["file"]).name for test in tests}, names - {"train.py"})

    def test_each_says_what_it_shows_and_how_to_run_it(self):
        page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
        for file in EXAMPLES:
            with self.subTest(file=file.name):
                self.assertIn(f"[{file.name}]({file.relative_to(ROOT / 'examples')})", page)
                docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
                self.assertRegex(docstring, rf"\A.+\n\nRun it: (python|pytest|torchrun) .*examples/.*{file.name}\Z")

    def test_the_commands_of_jobs_parse(self):
        commands = []
        for file in JOBS:
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".yml":
                self.assertIsInstance(yaml.safe_load(text), dict, file)
            # What CI puts in place of its variables.
            commands += re.findall(r"(?m)^[ -]*(?:run: )?torchtest (.*)$", text.replace("$CI_NODE_INDEX", "1"))
        self.assertEqual(len(commands), len(JOBS))
        for command in commands:
            with self.subTest(command=command):
                sources.read_options(shlex.split(command.replace("$CI_NODE_TOTAL", "3")), {}, ROOT, ROOT)


if __name__ == "__main__":
    unittest.main()
