"""Run files and JUnit XML of strangers, and files that do not belong together: one line each, nothing written."""

import contextlib
import io
import tempfile
import unittest
import zipfile
from pathlib import Path

from kit.run_files import passed, run_file

from torch_testing_ext.runner.cli import main

BOMB = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa">]><testsuites><testsuite>&a;</testsuite></testsuites>'


class BadFilesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.good = run_file(self.root / "good.ttx", [passed("tests/test_a.py::test_x")], shard="1/2")

    def command(self, *words):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            code = main([str(word) for word in words], self.root)
        return code, err.getvalue()

    def assertRefused(self, why, *files):
        out = self.root / "out.ttx"
        code, error = self.command("merge", *files, "-o", out)
        self.assertEqual(code, 4, error)
        self.assertIn(why, error)
        self.assertEqual(error.count("\n"), 1)
        self.assertFalse(out.exists())

    def zip_with(self, name, content):
        path = self.root / "bad.ttx"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, content)
        return path

    def test_files_that_merge_refuses(self):
        self.assertRefused(
            "has the format 'torch_testing_ext run file 99'",
            self.zip_with("header.json", '{"format": "torch_testing_ext run file 99"}'),
        )
        self.assertRefused("leaves the file", self.zip_with("../../x", ""))
        self.assertRefused("is not a run file", self.zip_with("x", ""))
        self.assertRefused("has the same run as", self.good, self.good)
        other = run_file(self.root / "other.ttx", [passed("tests/test_a.py::test_x")], project="q", clock=1.0)
        self.assertRefused("is of the project q", self.good, other)

    def test_a_torn_and_a_missing_shard_are_named(self):
        torn = self.root / "torn.ttx"
        torn.write_bytes(self.good.read_bytes()[:-40])
        code, error = self.command("merge", self.good, torn)
        self.assertEqual(code, 1)
        self.assertIn("torn.ttx is torn", error)
        self.assertIn("shard 2/2 is missing", error)

    def test_entities_of_xml_are_refused(self):
        path = self.root / "bomb.xml"
        path.write_text(BOMB)
        code, error = self.command("history", "test_x", path)
        self.assertEqual(code, 4)
        self.assertIn("declares a document type", error)
