"""assertExpectedInline and assertExpected in ranks: comparing, rewriting, and ranks that disagree."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.processes import clean_environ
from kit.warm import run_warm

from torch_testing_ext._testing.helpers import expectations
from torch_testing_ext.common_distributed import MultiProcessTestCase, RankFailure
from torch_testing_ext.common_utils import TestCase, run_tests

SUBJECT = subject(__file__, "expectations_of_ranks.py")
ACCEPTED = ('"""\\\nx\ny\nz"""', '"""\\\none\ntwo\nthree"""', '"""b"""', '"""only rank 2"""', '"""value 0"""')


class TestAccept(TestCase):
    def run_subject(self, *words: object, **environ: str) -> subprocess.CompletedProcess:
        environ = clean_environ(**{"EXPECTTEST_ACCEPT": "", **environ})
        return run_warm(*map(str, words), cwd=Path.cwd(), env=environ)

    def write(self, disagree: bool) -> Path:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        file = Path(directory.name, "subject.py")
        file.write_text(SUBJECT.replace("DISAGREE = False", f"DISAGREE = {disagree}"))
        return file

    def check_accepted(self, file: Path, accepted: subprocess.CompletedProcess) -> None:
        self.assertEqual(accepted.returncode, 0, accepted.stdout + accepted.stderr)
        text = file.read_text()
        for part in ACCEPTED:
            self.assertIn(part, text)
        expected = {each.name: each.read_text() for each in (file.parent / "expect").iterdir()}
        self.assertEqual(expected, {"Subject.test_a.expect": "in a\nfile", "Subject.test_d-d.expect": "value 0"})

    @pytest.mark.slow
    def test_source_is_rewritten_once_for_all_tests(self):
        file = self.write(disagree=False)
        refused = self.run_subject(file)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("Subject.test_d-d.expect does not exist; EXPECTTEST_ACCEPT=1 writes it", refused.stderr)
        accepted = self.run_subject(file, EXPECTTEST_ACCEPT="1")
        self.check_accepted(file, accepted)
        self.assertEqual(accepted.stdout.count("Accepting new output"), 7, accepted.stdout)
        again = self.run_subject(file, EXPECTTEST_ACCEPT="1")
        self.assertEqual(again.stdout.count("Accepting new output"), 0, again.stdout)
        again = self.run_subject(file)
        self.assertEqual(again.returncode, 0, again.stderr)

    def test_option_equals_variable(self):
        file = self.write(disagree=False)
        self.check_accepted(file, self.run_subject(file, "--accept"))

    @pytest.mark.slow
    def test_under_pytest(self):
        file = self.write(disagree=False)
        arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(file))
        self.check_accepted(file, self.run_subject(*arguments, EXPECTTEST_ACCEPT="1"))
        again = self.run_subject(*arguments)
        self.assertEqual(again.returncode, 0, again.stdout)

    @pytest.mark.slow
    def test_spawned_ranks(self):
        file = self.write(disagree=False)
        ended = self.run_subject(file, "--accept", "Subject.test_a", TORCH_TESTING_EXT_START="spawn")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertEqual(ended.stdout.count("Accepting new output"), 2, ended.stdout)
        self.assertIn(ACCEPTED[1], file.read_text())
        self.assertEqual((file.parent / "expect" / "Subject.test_a.expect").read_text(), "in a\nfile")

    def test_ranks_that_disagree_rewrite_nothing(self):
        file = self.write(disagree=True)
        before = file.read_text()
        ended = self.run_subject(file, "Subject.test_c", "Subject.test_d", EXPECTTEST_ACCEPT="1")
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("ranks disagree at", ended.stderr)
        self.assertIn("Subject.test_d-d.expect; ranks [0] of [0, 1, 2] agree with rank 0", ended.stderr)
        self.assertEqual(ended.stderr.count("-value 0"), 2)
        self.assertEqual(ended.stderr.count("+value 1"), 2)
        self.assertEqual(file.read_text(), before)
        self.assertFalse((file.parent / "expect").exists())


class TestText(TestCase):
    def test_any_text_is_kept(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "expect", "a.expect")
            for text in ("before", "grün, and a name that is not UTF-8: \udcff"):
                expectations.write(file, text)
                self.assertEqual(expectations.read_if_exists(file), text)


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

    def test_a_diff_shows_how_ranks_differ(self):
        self.assertExpectedInline(f"I am {self.rank}", """I am 0""")


if __name__ == "__main__":
    run_tests()
