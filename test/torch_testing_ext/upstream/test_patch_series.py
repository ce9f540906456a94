"""The series of patches for PyTorch: which patch is for which torch, and when a patch counts as proven."""

import re
import sys
import unittest
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

from kit.files import FolderCase

from torch_testing_ext.upstream.__main__ import main
from torch_testing_ext.upstream.mapping import UserError

SERIES = Path(__file__).parents[3] / "patches"
sys.path.insert(0, str(SERIES))

import patch_series  # noqa: E402
import torch_environments as environments  # noqa: E402

PATCH = """\
Subject: [PATCH] Answer
 rightly

Problem, cause, fix.
---
diff --git a/torch/deep/module.py b/torch/deep/module.py
--- a/torch/deep/module.py
+++ b/torch/deep/module.py
@@ -1 +1 @@
-ANSWER = 41
+ANSWER = 42
diff --git a/torch/deep/new.py b/torch/deep/new.py
new file mode 100644
--- /dev/null
+++ b/torch/deep/new.py
@@ -0,0 +1 @@
+NEW = True
"""
TEST = """
import unittest
from torch.deep import module
import torch.other

class AnswerTest(unittest.TestCase):
    def test_answer(self):
        {body}

if __name__ == "__main__":
    unittest.main()
"""


class RealSeriesTest(unittest.TestCase):
    """The patches in this repository."""

    def test_the_series_applies_to_the_installed_torch(self) -> None:
        package = environments.this_environment().package
        version = environments.version_of(package)
        if version in ("2.11", "2.12"):
            self.skipTest(f"the patches are for what PyTorch develops, from torch 2.13 on, and this is {version}")
        patches = patch_series.load(SERIES, version, with_old=True)
        self.assertGreater(len(patches), 4)
        with patch_series.patched_torch(patches, package) as torch:
            for patch in patches:
                torch.apply(patch)

    def test_every_patch_has_a_test_and_a_message(self) -> None:
        for version in ("2.13", "2.14", "2.15"):
            for patch in patch_series.load(SERIES, version, with_old=True):
                with self.subTest(patch=patch.file.name):
                    self.assertTrue(patch.test.is_file(), patch.test)
                    self.assertIn("Test plan:", patch.file.read_text())
                    self.assertNotEqual(patch.subject, patch.slug)

    def test_old_ones_are_out_of_the_series(self) -> None:
        """Those that PyTorch has, and those for a release alone."""
        for version, old in (("2.13", 7), ("2.14", 3), ("2.15", 0)):
            series = {patch.slug for patch in patch_series.load(SERIES, version)}
            whole = patch_series.load(SERIES, version, with_old=True)
            with self.subTest(version):
                self.assertEqual(len({patch.slug for patch in whole} - series), old)
        for file in SERIES.glob("*.patch"):
            self.assertNotIn("torch-2.13", file.name)

    def test_lines_are_as_long_as_pytorchs(self) -> None:
        """88 columns, but for a text: PyTorch's formatter leaves those."""
        for file in SERIES.glob("*.patch"):
            added = [line[1:] for line in file.read_text().splitlines() if line.startswith("+") and line[:3] != "+++"]
            long = [line for line in added if len(line) > 88 and not line.lstrip().startswith('"')]
            self.assertEqual(long, [], file.name)

    def test_the_order_names_each_patch(self) -> None:
        order = (SERIES / "README.md").read_text()
        for patch in patch_series.load(SERIES, "2.15"):
            self.assertRegex(order, rf"(?m)^\| .*\b{patch.number:04}\b")

    def test_the_table_of_proofs_has_each_patch_with_its_number_of_tests(self) -> None:
        table = (SERIES / "README.md").read_text().partition("## Proven")[2]
        for patch in patch_series.load(SERIES, "2.15"):
            tests = len(re.findall(r"^ +def test_", patch.test.read_text(), re.MULTILINE))
            self.assertIn(f"| {patch.number:04} | {tests} |", table)


class FakeSeriesTest(FolderCase):
    """Series for a package that only looks like torch."""

    def setUp(self) -> None:
        super().setUp()
        self.package = self.root / "site" / "torch"
        self.write("site/torch/version.py", "__version__ = '2.99.0+cpu'\n")
        self.write("site/torch/__init__.py", "")
        self.write("site/torch/other.py", "")
        self.write("site/torch/deep/__init__.py", "")
        self.write("site/torch/deep/module.py", "ANSWER = 41\n")

    def _series(self, body: str, patch: str = PATCH) -> tuple[patch_series.SeriesPatch, ...]:
        self.write("patches/0001-answer.patch", patch)
        self.write("patches/tests/test_answer.py", TEST.format(body=body))
        return patch_series.load(self.root / "patches", "2.99")

    def _check(self, body: str, patch: str = PATCH) -> patch_series.PatchProof:
        patches = self._series(body, patch)
        [proof] = patch_series.check(patches, patches, self.package)
        return proof

    def test_a_good_patch(self) -> None:
        proof = self._check("self.assertEqual(module.ANSWER, 42); import torch.deep.new")
        self.assertTrue(proof.proven, proof)
        self.assertRegex(
            str(proof), r"^0001-answer.patch: test_answer.py fails before, and passes after \(1 test, \d+ s\)$"
        )
        self.assertEqual((self.package / "deep" / "module.py").read_text(), "ANSWER = 41\n")
        self.assertFalse((self.package / "deep" / "new.py").exists())

    def test_a_test_that_passes_without_the_patch_proves_nothing(self) -> None:
        proof = self._check("pass")
        self.assertFalse(proof.proven)
        self.assertIn("passes before the patch", str(proof))

    def test_a_test_that_cannot_run_proves_nothing(self) -> None:
        patches = self._series("self.assertEqual(module.ANSWER, 42)")
        self.write("patches/tests/test_answer.py", "import a_module_that_does_not_exist\n")
        [proof] = patch_series.check(patches, patches, self.package)
        self.assertFalse(proof.proven)
        self.assertIn("could not run before the patch", str(proof))
        self.assertIn("a_module_that_does_not_exist", str(proof))

    def test_a_patch_that_does_not_help(self) -> None:
        proof = self._check("self.assertEqual(module.ANSWER, 43)")
        self.assertFalse(proof.proven)
        self.assertIn("does not pass after the patch", str(proof))

    def test_a_skip_after_the_patch_is_not_a_pass(self) -> None:
        proof = self._check("self.fail() if module.ANSWER == 41 else self.skipTest('no')")
        self.assertFalse(proof.proven, proof)

    def test_a_test_that_does_not_end_proves_nothing(self) -> None:
        with mock.patch.object(patch_series, "TEST_TIMEOUT", 0.2):
            proof = self._check("import time; time.sleep(60)")
        self.assertFalse(proof.proven, proof)

    def test_each_run_has_the_patches_before_it_and_no_later_one(self) -> None:
        second = PATCH.replace("41", "40").replace("42", "41").partition("diff --git a/torch/deep/new.py")[0]
        self.write("site/torch/deep/module.py", "ANSWER = 40\n")
        self.write("patches/0001-question.patch", second)
        self.write("patches/0002-answer.patch", PATCH)
        self.write("patches/tests/test_question.py", TEST.format(body="self.assertEqual(module.ANSWER, 41)"))
        self.write("patches/tests/test_answer.py", TEST.format(body="self.assertEqual(module.ANSWER, 42)"))
        patches = patch_series.load(self.root / "patches", "2.99")
        for wanted in patches, patches[1:]:
            proofs = list(patch_series.check(patches, wanted, self.package))
            self.assertEqual({proof.patch for proof in proofs if proof.proven}, set(wanted), proofs)

    def test_command(self) -> None:
        """Another environment's interpreter runs the tests; a line for each patch, and the exit code."""
        (self.root / "env" / "bin").mkdir(parents=True)
        (self.root / "env" / "bin" / "python").symlink_to(sys.executable)
        packages = self.root / "env" / "lib" / "python3.11" / "site-packages"
        packages.mkdir(parents=True)
        (packages / "torch").symlink_to(self.package)
        for body, code, end in (
            ("self.assertEqual(module.ANSWER, 42)", 0, r"fails before, and passes after \(1 test, \d+ s\)\n"),
            ("pass", 1, r"passes before the patch, but must fail\n(.|\n)*"),
        ):
            self._series(body)
            words = ["--check", "--series", str(self.root / "patches"), "--torch", str(self.root / "env")]
            out = StringIO()
            with redirect_stdout(out):
                self.assertEqual(main(["patches", *words]), code)
            head = rf"torch 2.99, {self.root}/env/bin/python: 1 of 1 patches\n1/1 0001-answer.patch: test_answer.py "
            self.assertRegex(out.getvalue(), rf"\A{head}{end}\Z")

    def test_progress(self) -> None:
        running: list[str] = []
        with mock.patch.object(patch_series, "HEARTBEAT", 0.001):
            patches = self._series("self.assertEqual(module.ANSWER, 42)")
            list(patch_series.check(patches, patches, self.package, on_heartbeat=running.append))
        self.assertIn("answer (", running[-1])

    def test_a_patch_that_does_not_apply(self) -> None:
        with self.assertRaisesRegex(UserError, "does not apply"):
            self._check("pass", PATCH.replace("-ANSWER = 41", "-ANSWER = 40"))

    def test_a_patch_of_files_that_no_wheel_has(self) -> None:
        with self.assertRaisesRegex(UserError, "no wheel has test/deep/module.py"):
            self._check("pass", PATCH.replace("torch/deep/module.py", "test/deep/module.py"))

    def test_versions(self) -> None:
        for name in ("0001-one.torch-2.99.patch", "0001-one.torch-2.98.patch", "0002-two.torch-2.98.patch"):
            self.write(f"patches/{name}", PATCH)
        series = self.root / "patches"
        self.assertEqual(
            [patch.file.name for patch in patch_series.load(series, "2.99")], ["0001-one.torch-2.99.patch"]
        )
        self.assertEqual(patch_series.others(series, "2.99"), ("two",))
        self.assertEqual(patch_series.load(series, "2.99")[0].subject, "Answer rightly")
        self.write("patches/0001-one.patch", PATCH)
        with self.assertRaisesRegex(UserError, "are both for torch 2.99"):
            patch_series.load(series, "2.99")

    def test_a_file_with_another_name_is_an_error(self) -> None:
        self.write("patches/my.patch", PATCH)
        with self.assertRaisesRegex(UserError, "a patch is named"):
            patch_series.load(self.root / "patches", "2.99")

    def test_user_errors_have_exit_code_2(self) -> None:
        self.assertEqual(main(["patches", "--series", str(self.root / "nowhere")]), 2)
        self.assertEqual(main(["patches", "--series", str(SERIES), "no such name"]), 2)
        for torch in "1.2", str(self.root):
            self.assertEqual(main(["patches", "--series", str(SERIES), "--torch", torch]), 2)


class EnvironmentsTest(FolderCase):
    """Environments that only look like some with torch."""

    def setUp(self) -> None:
        super().setUp()
        for name, version in ("one", "2.98"), ("two", "2.99"):
            self.write(f"{name}/bin/python", "")
            self.write(f"{name}/lib/python3.11/site-packages/torch/version.py", f"__version__ = '{version}.1+cpu'\n")
        self.write("three/bin/python", "")

    def test_by_path(self) -> None:
        for path in self.root / "two", self.root / "two" / "bin" / "python":
            found = environments.find(str(path))
            self.assertEqual((found.version, found.python), ("2.99", str(self.root / "two" / "bin" / "python")))
        with self.assertRaisesRegex(UserError, "neither a version"):
            environments.find(str(self.root / "three"))

    def test_by_version(self) -> None:
        this = environments.this_environment()
        self.assertEqual(environments.find(this.version), this)
        with mock.patch.object(sys, "prefix", str(self.root / "three")):
            self.assertEqual(environments.find("2.98").python, str(self.root / "one" / "bin" / "python"))
            with self.assertRaisesRegex(UserError, "torch 2.97 was not found.* 2.98 .*2.99"):
                environments.find("2.97")

    def test_several_are_listed(self) -> None:
        for version in "2.98", "2.99":
            self.write(f"patches/0001-one.torch-{version}.patch", PATCH.replace("rightly", version))
        out = StringIO()
        with redirect_stdout(out):
            words = ["--series", str(self.root / "patches"), "--torch", str(self.root / "one"), str(self.root / "two")]
            self.assertEqual(main(["patches", *words]), 0)
        self.assertIn("torch-2.98.patch: Answer 2.98\n", out.getvalue())
        self.assertIn("torch-2.99.patch: Answer 2.99\n", out.getvalue())


if __name__ == "__main__":
    unittest.main()
