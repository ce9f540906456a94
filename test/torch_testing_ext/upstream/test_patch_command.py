"""Tests of the patch command: git applies its patches, and refusals say what to use instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

from kit.checkout import CheckoutCase
from kit.import_forms import FILES

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests, subtest

sys.path.insert(0, str(Path(__file__).parents[3] / "patches"))

import outgoing

THEIRS = (
    "# Owner(s): [\"oncall: distributed\"]\nfrom torch.testing._internal.common_utils import run_tests\n\nx = 'ß'\n"
)
FORMATTED = THEIRS.replace("\n\nx = 'ß'", '\n\n\nx = "ß"')
OURS = THEIRS.replace("torch.testing._internal", "torch_testing_ext")


@instantiate_parametrized_tests
class PatchTest(CheckoutCase):
    def patch(self, *words: object) -> bytes:
        self.upstream("patch", "--pytorch", self.pytorch, *words, "-o", self.top / "out.patch")
        return (self.top / "out.patch").read_bytes()

    @parametrize("source", [subtest(source, name=name) for name, source in FILES.items()])
    def test_an_unchanged_imported_file_gives_an_empty_patch(self, source: bytes) -> None:
        helpers = self.pytorch / "torch/testing/_internal"
        self.put(helpers / "distributed/fake_pg.py", "class FakeStore: ...\n")
        common = helpers / "common_utils.py"
        common.write_text(f"{common.read_text()}\nNEWER = SEED = 1\n")
        file = self.put(self.pytorch / "test/distributed/test_x.py", source)
        self.upstream("import", file, code=1 if b"common_nn" in source else 0)
        cuda = b"from torch.testing._internal.common_nn import TEST_CUDA"
        self.assertEqual(cuda in source, cuda in (self.ours / "test/distributed/test_x.py").read_bytes())
        self.assertEqual(self.patch("test/distributed/test_x.py"), b"")

    def test_a_change_is_applied(self) -> None:
        there = self.put(self.pytorch / "test/distributed/test_x.py", THEIRS)
        self.put(self.ours / "test/distributed/test_x.py", OURS.replace("x = ", "y = "))
        patch = self.patch("test/distributed/test_x.py")
        self.assertIn("\nSubject: [PATCH] Update test_x.py\n", patch.decode())
        self.apply(patch)
        self.assertEqual(there.read_text(), THEIRS.replace("x = ", "y = "))

    def test_a_change_to_a_file_with_crlf_is_applied_byte_for_byte(self) -> None:
        there = self.put(self.pytorch / "test/test_x.py", THEIRS.replace("\n", "\r\n"))
        self.put(self.ours / "test/test_x.py", (OURS + "last = 1\n").replace("\n", "\r\n"))
        self.apply(self.patch("test/test_x.py"))
        self.assertEqual(there.read_bytes(), (THEIRS + "last = 1\n").replace("\n", "\r\n").encode())

    def test_a_header_is_never_dropped(self) -> None:
        header = "# Copyright (c) Meta Platforms, Inc. and affiliates\n"
        self.put(self.pytorch / "test/test_x.py", header + THEIRS)
        self.put(self.ours / "test/test_x.py", OURS.partition("\n")[2])
        for words in ([], ["--check"], ["--vendor"]):
            _, complaints = self.upstream("patch", "--pytorch", self.pytorch, "test/test_x.py", *words, code=1)
            for line in (header.strip(), THEIRS.splitlines()[0]):
                self.assertIn(f"test_x.py: this line of the checkout's file is missing: {line}\n", complaints)
        self.put(self.ours / "test/test_x.py", header + OURS)
        self.assertEqual(self.patch("test/test_x.py"), b"")

    def test_a_patch_that_the_file_needs_is_named(self) -> None:
        name = "test/distributed/test_x.py"
        self.put(self.ours / name, OURS)
        with mock.patch.dict(outgoing.patch_series.NEEDED, {name: ("fsdp-test-on-cpu",)}):
            [note] = outgoing.prepare(self.ours / name, self.pytorch).notes
        self.assertIn("test_x.py: it needs 0007-fsdp-test-on-cpu.torch-2.15.patch", note)
        self.assertEqual(outgoing.prepare(self.ours / name, self.pytorch).notes, ())

    def test_formatted_as_in_pytorch(self) -> None:
        ours = OURS.replace("x = 'ß'", f"def function({', '.join(f'parameter_{n}' for n in range(8))}): ...")
        self.put(self.ours / "test/test_x.py", ours)
        self.assertIn("\n+def function(\n+    parameter_0,\n", self.patch("test/test_x.py").decode())

    def test_a_file_that_is_formatted_otherwise_keeps_its_form(self) -> None:
        there = self.put(self.pytorch / "test/test_x.py", THEIRS)
        self.put(self.ours / "test/test_x.py", OURS + "y  =  1\n")
        self.apply(self.patch("test/test_x.py"))
        self.assertEqual(there.read_text(), THEIRS + "y  =  1\n")

    def test_git_am_applies_new_files(self) -> None:
        self.put(self.ours / "test/distributed/new/test_ü.py", OURS)
        self.put(self.ours / "test/test_y.py", OURS)
        files = ["test/distributed/new/test_ü.py", "test/test_y.py"]
        self.patch(*files, "--subject", "Add tests for größer")
        identity = ["-c", "user.name=n", "-c", "user.email=n@localhost"]
        subprocess.run(["git", *identity, "am", "--quiet", self.top / "out.patch"], cwd=self.pytorch, check=True)
        for file in files:
            self.assertEqual((self.pytorch / file).read_text(), FORMATTED)
        subject = subprocess.run(["git", "log", "-1", "--format=%s"], cwd=self.pytorch, capture_output=True, check=True)
        self.assertEqual(subject.stdout.decode().strip(), "Add tests for größer")

    def test_the_default_is_the_files_that_both_have(self) -> None:
        self.put(self.pytorch / "test/distributed/test_x.py", THEIRS)
        for name in ("test_x.py", "test_only_here.py"):
            self.put(self.ours / "test/distributed" / name, OURS + "# more\n")
        output, _ = self.upstream("patch", "--pytorch", self.pytorch)
        self.assertIn("test_x.py", output)
        self.assertNotIn("test_only_here.py", output)

    def test_the_checkout_is_only_read(self) -> None:
        self.put(self.pytorch / "test/test_x.py", THEIRS)
        self.put(self.ours / "test/test_x.py", OURS + "# more\n")
        before = self.contents(self.pytorch)
        self.patch("test/test_x.py")
        self.upstream("patch", "--pytorch", self.pytorch, "test/test_x.py", "--check")
        self.assertEqual(self.contents(self.pytorch), before)

    def contents(self, directory: Path) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}

    def test_check_says_that_a_file_is_ready(self) -> None:
        self.put(self.pytorch / "test/test_x.py", THEIRS)
        self.put(self.ours / "test/test_x.py", OURS)
        output, _ = self.upstream("patch", "--pytorch", self.pytorch, "--check", "test/test_x.py")
        self.assertEqual(output, "ready to send: test/test_x.py\n")

    def test_names_that_exist_only_here_are_refused_with_a_replacement(self) -> None:
        source = (
            "from torch_testing_ext.common_distributed import MultiProcessTestCase, RankError, run_subtests\n"
            "from torch_testing_ext import launch\n"
            "from torch_testing_ext.hypothesis_utils import given\n"
            "from torch_testing_ext import common_utils; common_utils.SEED\n"
            "from torch_testing_ext.common_utils import HardwareClassification\n"
        )
        self.put(self.ours / "test/test_x.py", source)
        lacks = "the checkout has no torch_testing_ext"
        for words in ([], ["--check"]):
            _, complaints = self.upstream("patch", "--pytorch", self.pytorch, "test/test_x.py", *words, code=1)
            for expected in (
                f"test/test_x.py:1: {lacks}.common_distributed.RankError (use RuntimeError",
                "run_subtests (before torch 2.4: torch.testing._internal.common_fsdp.run_subtests)",
                f"test/test_x.py:2: {lacks}.launch (use MultiProcessTestCase",
                f"test/test_x.py:5: {lacks}.common_utils.HardwareClassification (PyTorch has it in 2.14, 2.15",
                f"{lacks}.hypothesis_utils.given (use parametrize",
                f"test/test_x.py:4: {lacks}.common_utils.SEED",
                "Owner(s)",
                "--vendor",
            ):
                self.assertIn(expected, complaints)
            self.assertNotIn(f"{lacks}.common_distributed.MultiProcessTestCase", complaints)

    def test_vendored_names_bring_their_dependencies(self) -> None:
        self.put(self.ours / "test/test_x.py", OURS + "from torch_testing_ext.common_utils import dtype_name, SEED\n")
        self.put(self.ours / "test/test_y.py", OURS + "from torch_testing_ext.common_distributed import needs_of\n")
        self.apply(self.patch("test/test_x.py", "test/test_y.py", "--vendor"))
        helpers = self.pytorch / "torch/testing/_internal"
        scope: dict[str, object] = {}
        exec((helpers / "common_utils.py").read_text(), scope)
        self.assertEqual((scope["dtype_name"](scope["torch"].float32), scope["SEED"]), ("float32", 1234))
        text = (helpers / "common_distributed.py").read_text()
        scope = {}
        exec(text.replace("from torch.testing._internal", "from torch_testing_ext"), scope)
        self.assertEqual(scope["needs_of"](print), ())

    def test_a_name_that_depends_on_our_launch_cannot_be_vendored(self) -> None:
        source = "from torch_testing_ext.common_distributed import requires_world_size\n"
        self.put(self.ours / "test/test_x.py", source + "from torch_testing_ext.launch import Job\n")
        _, complaints = self.upstream("patch", "--pytorch", self.pytorch, "test/test_x.py", "--vendor", code=2)
        self.assertIn("requires_world_size: it depends on torch_testing_ext._", complaints)
        self.assertIn("cannot vendor torch_testing_ext.launch.Job: the checkout has no helper module", complaints)

    def test_a_dependency_that_means_something_else_there_is_refused(self) -> None:
        common = self.pytorch / "torch/testing/_internal/common_distributed.py"
        common.write_text(common.read_text() + "\nclass Need: ...\n")
        self.put(self.ours / "test/test_x.py", "from torch_testing_ext.common_distributed import needs_of\n")
        _, complaints = self.upstream("patch", "--pytorch", self.pytorch, "test/test_x.py", "--vendor", code=2)
        self.assertIn("needs_of: it needs our Need, but common_distributed.py defines another Need", complaints)

    @parametrize("inside_of_another", [False, True])
    def test_git_checks_the_patch(self, inside_of_another: bool) -> None:
        """Also for a checkout without a repository, unpacked below another repository, which git would use."""
        if inside_of_another:
            (self.pytorch / "unpacked").mkdir()
            (self.pytorch / "torch").rename(self.pytorch / "unpacked/torch")
            self.pytorch /= "unpacked"
        self.put(self.pytorch / "test/test_x.py", THEIRS)
        self.put(self.ours / "test/test_x.py", OURS + "# more\n")
        self.assertIn(b"+# more", self.patch("test/test_x.py"))
        wrong = b"diff --git a/test/test_x.py b/test/test_x.py\n--- a/test/test_x.py\n+++ b/test/test_x.py\n"
        wrong += b"@@ -1 +1 @@\n-not there\n+x\n"
        out = self.top / "wrong.patch"
        with mock.patch.object(outgoing, "_diff", lambda files, checkout: wrong):
            words = ["patch", "--pytorch", self.pytorch, "test/test_x.py", "-o", out]
            _, complaints = self.upstream(*words, code=2)
        self.assertIn("git apply exited with code 1", complaints)
        self.assertIn("patch does not apply", complaints)
        self.assertFalse(out.exists())

    def test_not_a_checkout(self) -> None:
        _, complaints = self.upstream("patch", "--pytorch", self.ours, code=2)
        self.assertIn("is not a PyTorch checkout", complaints)


if __name__ == "__main__":
    run_tests()
