"""Tests that PyTorch's module names give our modules, in every form of import and in every rank process."""

from __future__ import annotations

import re
import subprocess
import tempfile
import textwrap
import unittest
from pathlib import Path

import pytest
import torch
from kit.files import subject
from kit.processes import clean_environ, run_python
from kit.warm import run_warm

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest

STAND_INS = subject(__file__, "stand_ins.py")

PACKAGE = subject(__file__, "drop_in_package.py")

ALREADY_IMPORTED = subject(__file__, "already_imported.py")

OPERATORS = subject(__file__, "operators_of_pytorch.py")

IN_RANKS = subject(__file__, "ranks_with_stand_ins.py")


@instantiate_parametrized_tests
class DropInTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.top = Path(directory.name)

    def file(self, text: str, **parts: str) -> Path:
        file = self.top / "test_subject.py"
        file.write_text(textwrap.dedent(text).format(**parts) if parts else textwrap.dedent(text))
        return file

    def run_program(self, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
        return run_warm(*map(str, words), cwd=Path.cwd(), env=clean_environ(**environ))

    def run_file(self, *words: object, code: int = 0, **environ: str) -> str:
        done = self.run_program("-m", "torch_testing_ext.upstream", "run", *words, **environ)
        output = done.stdout + done.stderr
        self.assertEqual(done.returncode, code, output)
        return output

    @pytest.mark.slow
    def test_stand_ins(self) -> None:
        done = run_python(self.file(STAND_INS))
        self.assertEqual(done.returncode, 0, done.stderr)

    @pytest.mark.slow  # PyTorch's table of operators takes a second to make
    @unittest.skipIf(
        torch.__version__ < (2, 13),
        "older torch has no settings of a device, and 2.11 crashes at DTensors in threads, with PyTorch's classes too",
    )
    def test_tests_of_operators(self) -> None:
        """Those of PyTorch's `ops` and `op_db`, as its test_dtensor_ops has them: in order, on our bases."""
        output = self.run_file(self.file(OPERATORS), "-v")
        of_dtensors = [f"test_dtensor_op_db_{name}_cpu_float32" for name in ("add", "mul", "neg")]
        self.assertEqual(re.findall(r"^(test_\w+) \(.* ok$", output, re.MULTILINE), [*of_dtensors, "test_name_neg_cpu"])
        self.assertRegex(output, r"test_name_mul_cpu \(.* expected failure\n")
        self.assertIn("Ran 5 tests", output)

    def test_modules_of_a_package_that_torch_has_no_more(self) -> None:
        """As the file of the removed compiler imports them; others of that package are missing."""
        done = self.run_program(
            self.file(
                """
                from torch_testing_ext.upstream import drop_in

                drop_in.install()
                from torch.distributed._spmd.api import compile
                from torch.distributed._spmd.parallel_mode import DataParallel
                import torch.distributed._spmd.api
                from torch_testing_ext.distributed._spmd import api, parallel_mode

                assert compile is api.compile is torch.distributed._spmd.api.compile
                assert DataParallel is parallel_mode.DataParallel
                try:
                    import torch.distributed._spmd.comm_tensor
                except ModuleNotFoundError as error:
                    assert error.name == "torch.distributed._spmd.comm_tensor", error.name
                else:
                    raise AssertionError("it is there")
                """
            )
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_local_rank(self) -> None:
        """PyTorch's ranks have no LOCAL_RANK; ours have, unless a file of PyTorch's runs."""
        file = self.file(
            """
            import os
            from torch.testing._internal.common_distributed import MultiProcessTestCase
            from torch.testing._internal.common_utils import run_tests

            class Ranks(MultiProcessTestCase):
                world_size = 2

                def setUp(self):
                    super().setUp()
                    self._spawn_processes()

                def test_without(self):
                    self.assertNotIn("LOCAL_RANK", os.environ)

            if __name__ == "__main__":
                run_tests()
            """
        )
        self.run_file(file)

    @parametrize("before", [False, True])
    def test_other_modules_of_a_package(self, before: bool) -> None:
        """Those that are not mirrored are PyTorch's, also if they were imported before."""
        done = self.run_program(self.file(PACKAGE), *(["before"] if before else []))
        self.assertEqual(done.returncode, 0, done.stderr)

    @pytest.mark.slow
    def test_modules_imported_before(self) -> None:
        done = self.run_program(self.file(ALREADY_IMPORTED))
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in (
            "  Plain: our launch, through our DistributedTestBase",
            "  Deep: PyTorch's launch, since it uses or overrides _worker_loop",
            "  Starts: our launch, through our MultiProcessTestCase",
        ):
            self.assertIn(line, done.stdout)

    @parametrize(
        "environ",
        [
            subtest({}, name="forked_from_the_main_process"),
            subtest({"WITH_A_THREAD": "1"}, name="forked_from_a_new_interpreter"),
            subtest({"TORCH_TESTING_EXT_START": "spawn"}, name="spawned"),
        ],
    )
    def test_ranks_have_the_stand_ins_too(self, environ: dict[str, str]) -> None:
        file = self.file(IN_RANKS)
        output = self.run_file("--explain", file, "-v", "RanksTest.test_lazily", **environ)
        self.assertIn("test_lazily (__main__.RanksTest.test_lazily) ... ok", output)
        self.assertIn("All names that were used are ours.", output)
        self.assertNotIn("started as new interpreters", output)

    @pytest.mark.slow
    def test_a_failure_shows_the_command_to_run_it_again(self) -> None:
        """The command also serves to run each test in an interpreter of its own."""
        output = self.run_file(self.file(IN_RANKS), "--subprocess", "RanksTest.test_fails", code=1)
        found = re.search(r"run again:  python (.*) (.*) RanksTest.test_fails", output)
        self.assertEqual(found and found[1], "-m torch_testing_ext.upstream run", output)
        self.assertIn("Ran 1 tests, each in a process of its own: 1 failed.", output)

    def test_a_file_that_runs_no_tests_fails(self) -> None:
        output = self.run_file(self.file("class ATest: ..."), code=2)
        self.assertIn("ran no tests", output)
        self.assertNotIn("Traceback", output)

    def test_a_missing_file(self) -> None:
        output = self.run_file(self.top / "test_none.py", code=2)
        self.assertIn("test_none.py does not exist", output)

    def test_an_error_of_the_file_keeps_its_traceback(self) -> None:
        output = self.run_file(self.file("raise ValueError('of the file')\n"), code=1)
        self.assertIn("Traceback", output)
        self.assertIn("ValueError: of the file", output)

    def test_help_imports_no_torch(self) -> None:
        look = "import sys; from torch_testing_ext.upstream.__main__ import main\n"
        look += "try: main(['--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules, 'libcst' in sys.modules)"
        done = run_python("-c", look)
        self.assertEqual(done.stdout.splitlines()[-1], "False False", done.stderr)


if __name__ == "__main__":
    run_tests()
