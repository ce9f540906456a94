"""run_test.py takes the options of PyTorch's, and does what the table in the documentation says of each."""

import contextlib
import io
import os
import shlex
import signal
import unittest
from pathlib import Path
from unittest import mock

from kit.files import FolderCase

import torch_testing_ext
from torch_testing_ext.runner import cli, run_session
from torch_testing_ext.runner.options import Loader, ShardSpec, UsageError
from torch_testing_ext.runner.options.pytorch_words import OPTIONS
from torch_testing_ext.runner.options.sources import read_options

PAGE = Path(torch_testing_ext.__file__).resolve().parents[1] / "docs" / "migrate" / "pytorch.md"
SAME = "(always so)"
REFUSED = "(refused: use "


def rows():
    """The two columns of the table in the documentation."""
    block = PAGE.read_text(encoding="utf-8").partition("those on the right:\n\n```\n")[2].partition("```")[0]
    return [(line[:28].strip(), line[28:].strip()) for line in block.splitlines()]


class PytorchWordsTest(FolderCase):
    def read(self, *words, as_pytorch=True):
        return read_options(words, {}, self.root, self.root, as_pytorch=as_pytorch)

    def options(self, *words):
        return self.read(*words).options

    def test_each_row_of_the_table(self):
        self.assertGreaterEqual(len(rows()), 19)
        for theirs, ours in rows():
            with self.subTest(theirs):
                words = shlex.split(theirs)
                if ours.startswith(REFUSED):
                    remedy = ours.removeprefix(REFUSED).rstrip(")")
                    with self.assertRaisesRegex(UsageError, f"^{words[0]} of PyTorch's .* Use {remedy}"):
                        self.read(*words)
                    continue
                read = self.read(*words)
                self.assertEqual([note.partition(" ")[0] for note in read.notes], words if ours == SAME else [])
                written = self.read(*([] if ours == SAME else shlex.split(ours)), as_pytorch=False).options
                # A command line may name files as PyTorch does, too.
                self.assertEqual((*read.options.include, *read.options.names), written.names)
                for field in ("exclude", "keyword", "shard", "retries", "disabled", "showlocals", "coverage", "loader"):
                    self.assertEqual(getattr(read.options, field), getattr(written, field), field)
                self.assertEqual(read.options.junitxml, written.junitxml)

    def test_the_table_has_each_option_that_means_something(self):
        shown = {word for theirs, _ in rows() for word in theirs.split() if word.startswith("-")}
        useful = [option.flags for option in OPTIONS if not option.anyway and not option.refused]
        self.assertEqual([flags for flags in useful if shown.isdisjoint(flags)], [])

    def test_command_lines_of_pytorchs_ci(self):
        options = self.options(
            *("--distributed-tests", "--shard", "2", "3", "--verbose", "-i", "distributed/test_store", "--keep-going")
        )
        self.assertEqual((options.shard, options.include), (ShardSpec(2, 3), ("distributed/test_store",)))
        options = self.options(
            *["--exclude-jit-executor", "--shard", "1", "2", "--reruns=2", "-c", "--showlocals", "-k", "sum"]
        )
        self.assertEqual((options.retries, options.coverage, options.showlocals), (2, "*", True))
        self.assertEqual(self.options("--shard=1/2", "a").names, ("a",))
        self.assertEqual(self.options("--shard", "1/2", "a", "-pt").loader, Loader.PYTEST)
        self.assertEqual(self.options("a", "--", "--shard", "1", "2").pytest, "--shard 1 2")
        self.assertEqual(
            self.options("--import-disabled-tests").disabled, (self.root / ".pytorch-disabled-tests.json",)
        )

    def test_a_wrong_shard(self):
        for words, why in ((("4", "3"), "'4/3' is not a shard"), (("1",), "'1' is not a shard"), ((), "--shard needs")):
            with self.subTest(words), self.assertRaisesRegex(UsageError, why):
                self.read("--shard", *words)

    def test_refused(self):
        for flag, why in (
            ("--jit", "PyTorch's own run_test.py"),
            ("--enable-td", "--affected"),
            ("-core", "distributed"),
        ):
            with self.subTest(flag), self.assertRaisesRegex(UsageError, why):
                self.read(flag)

    def test_torchtest_has_its_own(self):
        for flag in ("--keep-going", "--distributed-tests"):
            with self.subTest(flag), self.assertRaisesRegex(UsageError, "is not an option"):
                self.read(flag, as_pytorch=False)

    def test_the_run_says_what_changes_nothing(self):
        said = io.StringIO()
        with (
            contextlib.redirect_stderr(said),
            mock.patch.dict(os.environ),
            mock.patch.object(signal, "signal"),
            mock.patch.object(run_session, "run", return_value=0),
        ):
            self.assertEqual(cli.main(["--keep-going"], self.root, as_pytorch=True), 0)
        self.assertIn("--keep-going changes nothing: a failure ends a run only with --exitfirst", said.getvalue())


if __name__ == "__main__":
    unittest.main()
