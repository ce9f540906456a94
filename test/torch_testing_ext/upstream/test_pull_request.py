"""A patch and its test as one commit in a checkout of PyTorch, and the form of the tests that the series has."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

from kit.checkout import CheckoutCase
from kit.files import subject

SERIES = Path(__file__).parents[3] / "patches"
sys.path.insert(0, str(SERIES))

import hardware_rules  # noqa: E402
import outgoing  # noqa: E402
import patch_series  # noqa: E402
import pull_request  # noqa: E402

MODULE = "torch/deep/module.py"
SUITE = "test/distributed/test_deep.py"
PATCH = f"""\
Subject: [PATCH] [deep] Answer
 rightly

Problem, cause, fix.

Test plan: the answer.
---
diff --git a/{MODULE} b/{MODULE}
--- a/{MODULE}
+++ b/{MODULE}
@@ -1 +1 @@
-ANSWER = 41
+ANSWER = 42
"""
TEST = subject(__file__, "pytorch_tests/deep_answer.py")
THEIRS = """\
# Owner(s): ["oncall: distributed"]

import os

from torch.deep import module
from torch.testing._internal.common_utils import run_tests, TestCase


class DeepTest(TestCase):
    def helper(self):
        return os.getpid()

    def test_there(self):
        self.assertTrue(module)


repeat(DeepTest)

if __name__ == "__main__":
    run_tests()
"""
MERGED = subject(__file__, "pytorch_tests/deep_merged.py")
IDENTITY = {
    "GIT_AUTHOR_NAME": "Ann",
    "GIT_AUTHOR_EMAIL": "ann@example.org",
    "GIT_COMMITTER_NAME": "Ann",
    "GIT_COMMITTER_EMAIL": "ann@example.org",
}


class PullRequestTest(CheckoutCase):
    def setUp(self) -> None:
        super().setUp()
        # Neither the git configuration of who runs this, nor a name that git makes of the machine's.
        alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "EMAIL": ""}
        environment = mock.patch.dict(os.environ, {**IDENTITY, **alone})
        environment.start()
        self.addCleanup(environment.stop)
        self.put(self.ours / "patches/0007-deep-answer.patch", PATCH)
        self.put(self.ours / "patches/tests/test_deep_answer.py", TEST)
        self.put(self.pytorch / MODULE, "ANSWER = 41\n")
        self.put(self.pytorch / SUITE, THEIRS)
        self.git("symbolic-ref", "HEAD", "refs/heads/main")
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "before")

    def git(self, *words: str) -> str:
        return subprocess.run(["git", *words], cwd=self.pytorch, capture_output=True, text=True, check=True).stdout

    def run_command(self, *words: object, code: int = 0) -> tuple[str, str]:
        return self.upstream("pull-request", *words, "--checkout", self.pytorch, code=code)

    def assertNothingChanged(self) -> None:
        self.assertEqual(self.git("status", "--porcelain"), "")
        self.assertEqual(self.git("branch", "--show-current"), "main\n")

    def test_the_commit_has_the_patch_and_its_test(self) -> None:
        out, _ = self.run_command("0007", "--issue", "123")
        self.assertEqual((self.pytorch / MODULE).read_text(), "ANSWER = 42\n")
        self.assertEqual((self.pytorch / SUITE).read_text(), MERGED)
        self.assertEqual(self.git("branch", "--show-current"), "deep-answer\n")
        self.assertEqual(self.git("status", "--porcelain"), "")
        head, body = "Ann <ann@example.org>, Ann", "Problem, cause, fix.\n\nTest plan: the answer."
        shown = self.git("show", "--no-patch", "--format=%an <%ae>, %cn%n%B").strip()
        self.assertEqual(shown, f"{head}\n[deep] Answer rightly\n\nFixes #123\n\n{body}")
        self.assertIn("by Ann <ann@example.org>:", out)
        self.assertIn(f"python {SUITE}", out)
        self.assertIn("git push YOUR_FORK deep-answer", out)

    def test_says_what_to_push_where(self) -> None:
        self.git("remote", "add", "origin", "https://github.com/pytorch/pytorch.git")
        self.git("remote", "add", "zoe", "git@example.org:zoe/pytorch.git")
        out, _ = self.run_command("0007")
        self.assertIn("git push zoe deep-answer", out)
        self.assertIn("issues/0007-deep-answer.md", out)

    def test_invents_no_committer(self) -> None:
        for name in IDENTITY:
            del os.environ[name]
        _, complaint = self.run_command("0007", code=2)
        self.assertIn("user.email", complaint)
        self.assertNothingChanged()

    def test_leaves_changes_alone(self) -> None:
        self.put(self.pytorch / MODULE, "ANSWER = 41\n\n")
        _, complaint = self.run_command("0007", code=2)
        self.assertIn(f"M {MODULE}", complaint)
        self.assertEqual(self.git("branch", "--show-current"), "main\n")

    def test_refuses_what_does_not_fit(self) -> None:
        for file, text, said in (
            (SUITE, THEIRS.replace("test_there", "test_answer"), "DeepTest of the checkout has test_answer already"),
            (MODULE, "ANSWER = 40\n", "does not apply"),
            (SUITE, None, "does not exist: PyTorch has moved it"),
        ):
            with self.subTest(said):
                (self.pytorch / file).unlink() if text is None else self.put(self.pytorch / file, text)
                self.git("commit", "--quiet", "--all", "--message", "newer")
                _, complaint = self.run_command("0007", code=2)
                self.assertIn(said, complaint)
                self.git("reset", "--quiet", "--hard", "HEAD~1")
        _, complaint = self.run_command("0008", code=2)
        self.assertIn("These are there: 0007", complaint)
        self.assertNothingChanged()

    def test_a_new_class_says_that_it_needs_no_device(self) -> None:
        """The linter of a checkout that has one asks for it; of the file's own classes it has its own opinion."""
        utilities = self.pytorch / "torch/testing/_internal/common_utils.py"
        self.put(utilities, utilities.read_text() + "\n\nclass HardwareClassification: ...\n")
        self.put(self.pytorch / "tools/linter/adapters/test_linter.py", "")
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "newer")
        self.run_command("0007")
        found = (self.pytorch / SUITE).read_text()
        self.assertIn('    """New here."""\n\n    hw_classification = HardwareClassification.GENERIC\n\n    def', found)
        self.assertIn("    HardwareClassification,\n    run_tests,\n", found)
        broken = list(hardware_rules.broken_rules(found.encode()))
        self.assertEqual(len(broken), 1, broken)  # DeepTest was so before
        self.assertIn("DeepTest needs", broken[0])

    def test_a_test_that_breaks_a_rule_is_not_committed(self) -> None:
        """A class for all accelerators, whose tests have a parameter for the device."""
        self.put(self.pytorch / "tools/linter/adapters/test_linter.py", "")
        declared = "class DeepTest(TestCase):\n    hw_classification = HardwareClassification.GENERIC\n"
        self.put(self.pytorch / SUITE, THEIRS.replace("class DeepTest(TestCase):\n", declared))
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "newer")
        test = self.ours / "patches/tests/test_deep_answer.py"
        self.put(test, TEST.replace("def test_answer(self)", "def test_answer(self, device)"))
        _, complaint = self.run_command("0007", code=2)
        self.assertIn("DeepTest.test_answer is GENERIC: remove its parameter", complaint)
        self.assertNothingChanged()

    def test_names_that_the_file_imports_later_are_not_imported_twice(self) -> None:
        later = "\nif os.name:\n    from torch.deep import (\n        module,\n        zebra,\n    )\n"
        target = THEIRS.replace("from torch.deep import module\n", "").replace(
            "\n\nclass Deep", f"{later}\n\nclass Deep"
        )
        found = pull_request.merged(TEST, target, classify=False)
        self.assertEqual(found.count("zebra"), 2)  # the import below the `if`, and the use


class TestsOfTheSeries(unittest.TestCase):
    """The tests of the patches to be sent have PyTorch's form."""

    def setUp(self) -> None:
        self.patches = patch_series.load(SERIES, "2.15")
        self.assertGreater(len(self.patches), 10)

    def test_say_where_they_belong(self) -> None:
        for patch in self.patches:
            with self.subTest(patch.slug):
                self.assertRegex(pull_request.target_of(patch.test).as_posix(), r"^test/\w+/([\w/]+/)?test_\w+\.py$")
                self.assertTrue(patch.test.read_text().startswith("# Owner(s): ["))

    def test_use_pytorchs_classes_alone(self) -> None:
        for patch in self.patches:
            with self.subTest(patch.slug):
                nodes = list(ast.walk(ast.parse(patch.test.read_text())))
                modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
                modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
                roots = {module.partition(".")[0] for module in modules}
                self.assertLessEqual(roots, {"torch", *sys.stdlib_module_names})
                self.assertIn("run_tests()", patch.test.read_text())

    def test_have_the_form_of_pytorchs_linter(self) -> None:
        for patch in self.patches:
            with self.subTest(patch.slug):
                source = patch.test.read_bytes()
                self.assertEqual(outgoing.formatted(source, None), source)

    def test_no_patch_invents_its_author(self) -> None:
        for file in [*SERIES.glob("*.patch"), *SERIES.glob("old/*.patch")]:
            self.assertTrue(file.read_text().startswith("Subject: [PATCH] "), file)


if __name__ == "__main__":
    unittest.main()
