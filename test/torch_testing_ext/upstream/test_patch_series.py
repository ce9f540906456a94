"""The series of patches for PyTorch: which patch is for which torch, and when a patch counts as proven."""

import unittest
from pathlib import Path

from kit.files import FolderCase

from torch_testing_ext.upstream import patch_series
from torch_testing_ext.upstream.__main__ import main
from torch_testing_ext.upstream.mapping import UserError, installed_torch

SERIES = Path(__file__).parents[3] / "patches"
PATCH = """\
From: Your Name <you@example.com>
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
        package = installed_torch() / "torch"
        patches = patch_series.load(SERIES, patch_series.version_of(package))
        self.assertGreater(len(patches), 4)
        with patch_series.patched_torch(patches, package) as torch:
            for patch in patches:
                torch.apply(patch)

    def test_every_patch_has_a_test_and_a_message(self) -> None:
        for version in ("2.13", "2.15"):
            for patch in patch_series.load(SERIES, version):
                with self.subTest(patch=patch.file.name):
                    self.assertTrue(patch.test.is_file(), patch.test)
                    self.assertIn("Test plan:", patch.file.read_text())
                    self.assertNotEqual(patch.subject, patch.slug)


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

    def _check(self, body: str, patch: str = PATCH) -> list[tuple[str, bool]]:
        patches = self._series(body, patch)
        return list(patch_series.check(patches, patches, self.package))

    def test_a_good_patch(self) -> None:
        [(line, good)] = self._check("self.assertEqual(module.ANSWER, 42); import torch.deep.new")
        self.assertTrue(good, line)
        self.assertEqual((self.package / "deep" / "module.py").read_text(), "ANSWER = 41\n")
        self.assertFalse((self.package / "deep" / "new.py").exists())

    def test_a_test_that_passes_without_the_patch_proves_nothing(self) -> None:
        [(line, good)] = self._check("pass")
        self.assertFalse(good)
        self.assertIn("passes before the patch", line)

    def test_a_test_that_cannot_run_proves_nothing(self) -> None:
        patches = self._series("self.assertEqual(module.ANSWER, 42)")
        self.write("patches/tests/test_answer.py", "import a_module_that_does_not_exist\n")
        lines = list(patch_series.check(patches, patches, self.package))
        self.assertEqual([good for _, good in lines], [False, False])
        self.assertIn("could not run before the patch", lines[0][0])

    def test_a_patch_that_does_not_help(self) -> None:
        [(line, good)] = self._check("self.assertEqual(module.ANSWER, 43)")
        self.assertFalse(good)
        self.assertIn("does not pass after the patch", line)

    def test_a_skip_after_the_patch_is_not_a_pass(self) -> None:
        [(line, good)] = self._check("self.fail() if module.ANSWER == 41 else self.skipTest('no')")
        self.assertFalse(good, line)

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


if __name__ == "__main__":
    unittest.main()
