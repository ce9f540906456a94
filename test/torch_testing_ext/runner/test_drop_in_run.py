"""Runs unchanged files that are written for PyTorch's own classes with run_test.py."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.files import subject
from kit.warm import run_warm

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PLAIN = "import unittest\n\nclass T(unittest.TestCase):\n    def test(self): pass\n"
SUBJECT = subject(__file__, "drop_in_ranks.py")


class DropInRunTest(TestCase):
    def run_dropped_in(self, directory, *words):
        words = ("--cache", str(directory / "cache"), "--drop-in", *words)
        return run_warm(str(ROOT / "run_test.py"), *words, cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def test_files_of_a_checkout(self):
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary).resolve()
            tests = directory / "checkout/test/distributed"
            tests.mkdir(parents=True)
            (directory / "checkout/torch").mkdir()  # must not be imported instead of the installed torch
            (tests / "test_ranks.py").write_text(SUBJECT)
            (tests / "test_more.py").write_text(PLAIN)
            (tests / "test_newer.py").write_text("from torch.distributed import from_the_future\n")
            done = self.run_dropped_in(directory, *map(str, sorted(tests.iterdir())))
        said = done.stdout + done.stderr
        self.assertEqual(done.stdout.splitlines()[-1], "2 passed, 2 failed, 0 skipped", said)
        self.assertIn("lacks what it uses of torch.distributed", said)
        self.assertEqual(done.returncode, 1, said)
        self.assertIn("rank 1 of 2 exited with code 3", said)
        self.assertIn("This is stricter than PyTorch, where the test would have passed", said)
        command = f"--drop-in {directory}/checkout test/distributed/test_ranks.py::RanksTest::test_one_rank_leaves"
        self.assertIn(command, said)

    def test_names_and_several_drop_ins(self):
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary).resolve()
            for name in ("a/test_one.py", "a/test_two.py", "b/test_three.py"):
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_text(PLAIN)
            right = (
                (["a"], 2),
                (["a", "test_one"], 1),
                (["a", "a/test_two.py::T::test"], 1),
                (["a", "--drop-in", "b"], 3),
                (["a", "--drop-in", "b", "test_three", "test_two"], 2),
                (["a/test_one.py", "--drop-in", "b"], 2),
            )
            wrong = (
                (["none"], "there is no such file or folder"),
                (["a", "--drop-in", "a"], "named twice"),
                (["a", "test_three"], "no test file has this name"),
            )
            with ThreadPoolExecutor(2) as two_at_once:
                runs = two_at_once.map(lambda one: self.run_dropped_in(directory, *one[0]), (*right, *wrong))
                finished = list(runs)
        for (words, count), done in zip(right, finished[: len(right)], strict=True):
            with self.subTest(words=words):
                last = f"{count} passed, 0 failed, 0 skipped"
                self.assertEqual(done.stdout.splitlines()[-1:], [last], done.stdout + done.stderr)
        for (words, message), done in zip(wrong, finished[len(right) :], strict=True):
            with self.subTest(words=words):
                self.assertEqual(done.returncode, 4, done.stdout + done.stderr)
                self.assertIn(message, done.stderr)


if __name__ == "__main__":
    run_tests()
