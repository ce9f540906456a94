"""Twenty runs of a thousand tests: each command reads them within seconds, and a file of them is small."""

import contextlib
import io
import tempfile
import time
import unittest
from pathlib import Path

import pytest
from kit.run_files import passed, stored_run

from torch_testing_ext.runner.cli import main
from torch_testing_ext.runner.model import Lease
from torch_testing_ext.runner.run_files.run_file import RunFacts, StoredRun, digest_of, write_run_file


@pytest.mark.slow
class ManyRunsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)
        tests = [
            passed(f"tests/test_{n // 50}.py::CollectiveTest::test_all_reduce_{n}", lease=Lease((), (0,)))
            for n in range(1000)
        ]
        run = stored_run(tests, host="machine-00", clock=1_800_000_000.0)
        cls.files = []
        for number in range(20):
            journal = run.journal.replace(b"machine-00", b"machine-%02d" % number)
            cls.files.append(cls.root / f"run-{number}.ttx")
            write_run_file(cls.files[-1], [StoredRun(RunFacts(digest_of(journal), "p"), journal)])
        (cls.root / "tests").mkdir()
        for n in range(20):
            methods = "".join(f"    def test_all_reduce_{50 * n + m}(self): pass\n" for m in range(50))
            (cls.root / "tests" / f"test_{n}.py").write_text(f"class CollectiveTest(TestCase):\n{methods}")

    def test_a_thousand_passes_are_below_a_megabyte(self):
        self.assertLess(self.files[0].stat().st_size, 1_000_000)

    def test_each_command_reads_all_within_seconds(self):
        """Of processor time, since others may use the machine."""
        (a, *others) = map(str, self.files)
        tests = ["--tests", str(self.root / "tests")]
        for words, must in (
            (["history", "test_all_reduce_7", a, *others], "20 runs: 0 failed"),
            (["diff", a, a], "0 new failures"),
            (["census", a, *others, *tests], "0 of 1000 tests not seen running in 20 runs on 20 machines"),
            (["merge", a, *others, "-o", str(self.root / "all.ttx")], "20000 passed"),
            (["merge", a, *others, "--html", str(self.root / "x.html")], "20000 passed"),
            (["merge", a, *others, "--junitxml", str(self.root / "x.xml")], "20000 passed"),
        ):
            with self.subTest(words[0], report=words[-2]):
                began = time.process_time()
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    code = main(words, self.root)
                took = time.process_time() - began
                self.assertEqual(code, 0)
                self.assertIn(must, out.getvalue())
                # Three times as long on a machine whose processors are slow.
                self.assertLess(took, 15.0)
