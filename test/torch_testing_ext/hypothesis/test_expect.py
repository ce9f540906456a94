"""assertExpectedInline in ranks: who compares, who rewrites, and what is said when ranks disagree."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_testing_ext.common_distributed import MultiProcessTestCase, RankFailure
from torch_testing_ext.common_utils import TestCase, run_tests

SUBJECT = '''
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests

class Subject(MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_a(self):
        self.assertExpectedInline("one\\ntwo\\nthree", """""")

    def test_b(self):
        self.assertExpectedInline("b", """old""")
        if self.rank == 2:
            self.assertExpectedInline("only rank 2", """""")

    def test_c(self):
        self.assertExpectedInline(f"value {{self.rank if {disagree} else 0}}", """""")


if __name__ == "__main__":
    run_tests()
'''


class TestAccept(TestCase):
    def run_subject(self, file: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
        command = [sys.executable, str(file), *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)

    def write(self, disagree: bool) -> Path:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        file = Path(directory.name, "subject.py")
        file.write_text(SUBJECT.format(disagree=disagree))
        return file

    def test_source_is_rewritten_once_for_all_tests(self):
        file = self.write(disagree=False)
        self.assertNotEqual(self.run_subject(file).returncode, 0)
        accepted = self.run_subject(file, EXPECTTEST_ACCEPT="1")
        self.assertEqual(accepted.returncode, 0, accepted.stderr)
        self.assertEqual(accepted.stdout.count("Accepting new output"), 4, accepted.stdout)
        text = file.read_text()
        for part in ('"""\\\none\ntwo\nthree"""', '"""b"""', '"""only rank 2"""', '"""value 0"""'):
            self.assertIn(part, text)
        again = self.run_subject(file)
        self.assertEqual(again.returncode, 0, again.stderr)

    def test_option_does_the_same_as_the_variable(self):
        file = self.write(disagree=False)
        self.assertEqual(self.run_subject(file, "--accept").returncode, 0)
        self.assertEqual(self.run_subject(file).returncode, 0)

    def test_ranks_that_disagree_rewrite_nothing(self):
        file = self.write(disagree=True)
        before = file.read_text()
        ended = self.run_subject(file, "Subject.test_c", EXPECTTEST_ACCEPT="1")
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("ranks disagree", ended.stderr)
        self.assertIn("-value 0", ended.stderr)
        self.assertIn("+value 1", ended.stderr)
        self.assertEqual(file.read_text(), before)


class TestCompare(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_every_rank_compares(self):
        self.assertExpectedInline("the same", """the same""")

    def test_lines_to_be_ignored(self):
        self.assertExpectedInline("# x\na", """a""", ignore_comments=True)

    def _join_processes(self, fn):
        if "differ" not in self._testMethodName:
            super()._join_processes(fn)
            return
        with self.assertRaises(RankFailure) as caught:
            super()._join_processes(fn)
        message = str(caught.exception)
        self.assertIn("ranks disagree", message)
        self.assertIn("+I am 1", message)

    def test_ranks_that_differ_are_told_of_with_a_diff_between_them(self):
        self.assertExpectedInline(f"I am {self.rank}", """I am 0""")


if __name__ == "__main__":
    run_tests()
