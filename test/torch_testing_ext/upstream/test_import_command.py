"""Tests of the import command: target paths, reported problems, and that it imports all files or none."""

from __future__ import annotations

from kit.checkout import CheckoutCase
from kit.processes import run_python

from torch_testing_ext.common_utils import run_tests

PLAIN = "# a comment\nfrom torch.testing._internal.common_utils import TestCase, run_tests  # kept\n"


class ImportTest(CheckoutCase):
    def test_the_path_below_tests_stays(self) -> None:
        file = self.put(self.pytorch / "test/distributed/tensor/test_x.py", PLAIN)
        output, complaints = self.upstream("import", file)
        target = self.ours / "test/distributed/tensor/test_x.py"
        self.assertEqual(target.read_text(), PLAIN.replace("torch.testing._internal", "torch_testing_ext"))
        self.assertEqual((output, complaints), (f"{file} -> test/distributed/tensor/test_x.py\n", ""))
        self.assertEqual(file.read_text(), PLAIN)

    def test_a_file_outside_any_checkout(self) -> None:
        below_tests = self.put(self.top / "elsewhere/test/a/test_x.py", PLAIN)
        loose = self.put(self.top / "elsewhere/test_y.py", PLAIN)
        self.upstream("import", below_tests, loose, "--to", "mine")
        written = sorted(str(file.relative_to(self.ours)) for file in self.ours.rglob("*.py"))
        self.assertEqual(written, ["mine/a/test_x.py", "mine/test_y.py"])

    def test_missing_names_are_reported_with_their_lines(self) -> None:
        source = (
            "from torch.testing._internal.common_utils import TestCase, not_here\n"
            "from torch.testing._internal.common_nn import TEST_CUDA\n"
            "from torch.testing._internal.common_utils import TEST_XPU, SEED\n"
            "from torch.testing._internal.common_distributed import MultiProcContinousTest\n"
        )
        file = self.put(self.pytorch / "test/test_x.py", source)
        _, complaints = self.upstream("import", file, code=1)
        lines = complaints.splitlines()
        self.assertEqual(len(lines), 3, complaints)
        self.assertIn("line 1: torch_testing_ext.common_utils has no not_here", lines[0])
        self.assertIn("(since torch 2.9: ", lines[1])
        self.assertIn("line 2: torch.testing._internal.common_nn.TEST_CUDA stays PyTorch's", lines[2])
        self.assertTrue((self.ours / "test/test_x.py").exists())

    def test_a_syntax_error_in_one_file_imports_none(self) -> None:
        good = self.put(self.pytorch / "test/test_good.py", PLAIN)
        bad = self.put(self.pytorch / "test/test_bad.py", "def f(:\n")
        _, complaints = self.upstream("import", good, bad, code=2)
        self.assertIn(f"{bad}:1: not valid Python, so nothing was changed", complaints)
        self.assertEqual(list(self.ours.rglob("*.py")), [])
        self.assertEqual(bad.read_text(), "def f(:\n")

    def test_a_missing_file(self) -> None:
        _, complaints = self.upstream("import", self.pytorch / "test/test_none.py", code=2)
        self.assertIn("test_none.py does not exist", complaints)

    def test_without_libcst_the_error_says_what_to_install(self) -> None:
        code = "import sys; sys.modules['libcst'] = None; from torch_testing_ext.upstream.__main__ import main; "
        done = run_python("-c", f"{code}sys.exit(main(['import', 'x.py']))")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("this command needs libcst: python -m pip install 'libcst>=1.4'", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_a_different_file_is_overwritten_only_by_force(self) -> None:
        file = self.put(self.pytorch / "test/test_x.py", PLAIN)
        target = self.put(self.ours / "test/test_x.py", "mine\n")
        _, complaints = self.upstream("import", file, code=2)
        self.assertIn("--force", complaints)
        self.assertEqual(target.read_text(), "mine\n")
        self.upstream("import", file, "--force")
        self.upstream("import", file)  # an identical file is no conflict
        self.assertIn("torch_testing_ext", target.read_text())


if __name__ == "__main__":
    run_tests()
