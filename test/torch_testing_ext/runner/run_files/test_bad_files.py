"""Run files and JUnit XML of strangers, and files that do not belong together: one line each, nothing written."""

import contextlib
import io
import json
import re
import tempfile
import unittest
import zipfile
from pathlib import Path

from kit.run_files import passed, run_file

from torch_testing_ext.runner.cli import main
from torch_testing_ext.runner.run_files.run_file import digest_of

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

    def other(self, clock, seconds=0.1):
        tests = [passed("tests/test_b.py::test_x", seconds)]
        return run_file(self.root / "other.ttx", tests, shard="2/2", host="b", clock=clock)

    def test_clocks_that_disagree(self):
        """The lanes of the page begin together then."""
        other, page = self.other(1e9), self.root / "x.html"
        self.assertEqual(self.command("merge", self.good, other, "--html", page), (0, ""))
        self.assertIn("the clocks of these machines disagree by days: their lanes begin together", page.read_text())
        self.assertEqual(self.command("history", "test_x", self.good, other), (0, ""))

    def test_times_that_are_none(self):
        for number in (-1.0, 1e300, float("inf"), float("nan")):
            for other in (self.other(number), self.other(1e9, number)):
                with self.subTest(number):
                    self.assertRefused("began or ended at no date", self.good, other)
                    code, error = self.command("history", "test_x", self.good, other)
                    self.assertEqual((code, error.count("\n")), (4, 1), error)

    def test_a_torn_and_a_missing_shard_are_named(self):
        torn = self.root / "torn.ttx"
        torn.write_bytes(self.good.read_bytes()[:-40])
        code, error = self.command("merge", self.good, torn)
        self.assertEqual(code, 1)
        self.assertIn("torn.ttx is torn", error)
        self.assertIn("shard 2/2 is missing", error)

    def test_damaged_and_hostile_zips(self):
        good = self.good.read_bytes()
        with zipfile.ZipFile(self.good) as file:
            header, journal = file.read("header.json"), file.read("runs/0/journal.jsonl")
        facts = json.loads(header)
        for name, content, why in (
            ("empty", b"", "is not a run file|is neither a run file"),
            ("text", b"hello", "is not a run file|is neither a run file"),
            ("flipped", good[:300] + bytes([good[300] ^ 255]) + good[301:], "bad|torn|damaged"),
            ("another journal", self.zipped(header, journal + b"x"), "its journal 0 is not the one"),
            ("no journal", self.zipped(header), "header does not fit"),
            ("no JSON", self.zipped(b"{" * 100_000), "is not a run file"),
            ("deep JSON", self.zipped(b"[" * 1_000_000), "is not a run file"),
            ("a list", self.zipped(b"[]"), "is not a run file"),
            ("no format", self.zipped(b"{}"), "is not a run file"),
            ("format of another kind", self.zipped(b'{"format": ["x"]}'), "has the format"),
            ("unknown field", self.zipped(json.dumps({**facts, "x": 1}).encode(), journal), "header does not fit"),
            ("runs of another kind", self.zipped(json.dumps({**facts, "runs": 7}).encode()), "header does not fit"),
            ("no run", self.zipped(json.dumps({**facts, "runs": []}).encode()), "has no run"),
            ("a bomb", self.zipped(header, *[bytes(1 << 26)] * 9), "unpacks to"),
            ("an absolute path", self.zipped(header, journal, name="/etc/passwd"), "leaves the file"),
            ("a path of Windows", self.zipped(header, journal, name="..\\x"), "leaves the file"),
            ("many entries", self.zipped(header, *[b""] * 1001), "has 1002 entries"),
            ("encrypted", self.encrypted(self.zipped(header, journal)), "is encrypted"),
            ("a journal that is none", self.claimed(facts, b"hello\n"), "is not the journal of a run"),
            ("a journal of tomorrow", self.claimed(facts, b'{"JournalHeader": {"format": "x 9"}}\n'), "has the format"),
            ("a journal without a run", self.claimed(facts, journal.split(b"\n")[0] + b"\n"), "ends before its run"),
        ):
            path = self.root / "bad.ttx"
            path.write_bytes(content)
            for words in (("merge", path), ("replay", path), ("diff", path, path), ("history", "x", path)):
                with self.subTest(name, command=words[0]):
                    code, error = self.command(*words)
                    self.assertRegex(error, why)
                    self.assertEqual((code, error.count("\n")), (4, 1), error)

    def zipped(self, header, *journals, name="runs/{}/journal.jsonl"):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("header.json", header)
            for number, journal in enumerate(journals):
                file.writestr(name.format(number), journal)
        return content.getvalue()

    def claimed(self, facts, journal):
        """A file whose header has the digest of this journal."""
        (run,) = facts["runs"]
        header = {**facts, "runs": [{**run, "digest": digest_of(journal)}]}
        return self.zipped(json.dumps(header).encode(), journal)

    def encrypted(self, content):
        """The same zip with the flag of encryption at each entry."""
        local = content.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01")
        return re.sub(rb"(PK\x01\x02....)\x00", lambda entry: entry[1] + b"\x01", local, flags=re.DOTALL)

    def test_a_folder_in_place_of_a_file(self):
        folder = self.root / "folder.ttx"
        folder.mkdir()
        code, error = self.command("replay", folder)
        self.assertEqual((code, error.count("\n")), (4, 1), error)

    def test_an_output_that_cannot_be_written(self):
        for words in (("merge", self.good, "-o", "/dev/null/x.ttx"), ("census", self.good, "--json", "/dev/null/x")):
            with self.subTest(words[0]):
                (self.root / "test_a.py").write_text("def test_x(): pass\n")
                code, error = self.command(*words, *(["--tests", self.root] if words[0] == "census" else []))
                self.assertEqual((code, error.count("\n")), (4, 1), error)

    def test_hostile_xml(self):
        """Each is refused in one sentence, and costs neither memory nor time."""
        suite = "<testsuite name='s'>{}</testsuite>"
        entities = "".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10}'>" for n in range(1, 10))
        for name, text, why in (
            ("entities", BOMB, "declares a document type"),
            ("a bomb", f"<!DOCTYPE x [<!ENTITY a0 'ha'>{entities}]><testsuite>&a9;</testsuite>", "declares a document"),
            ("a file", "<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><testsuite>&a;</testsuite>", "declares"),
            ("a document type elsewhere", "<!DOCTYPE x SYSTEM 'http://x.invalid/x.dtd'><testsuite/>", "declares"),
            ("an entity without declaration", suite.format("&a;"), "undefined entity"),
            ("deep", "<testsuite>" * 100_000, "is nested deeper"),
            ("cut off", suite.format("<testcase name='test_x'")[:-20], "neither a run file nor JUnit XML"),
            ("a page", "<html><body/></html>", "it has no testsuite"),
            ("nothing", "", "neither a run file nor JUnit XML"),
            ("text", "hello", "neither a run file nor JUnit XML"),
            ("NUL", "\0" * 100, "neither a run file nor JUnit XML"),
            ("another encoding", "<?xml version='1.0' encoding='x-none'?><testsuite/>", "neither a run file nor"),
        ):
            path = self.root / "bad.xml"
            path.write_text(text)
            (self.root / "test_a.py").write_text("def test_x(): pass\n")
            for words in (
                ("history", "test_x", path),
                ("diff", path, self.good),
                ("census", path, "--tests", self.root),
            ):
                with self.subTest(name, command=words[0]):
                    code, error = self.command(*words)
                    self.assertRegex(error, why)
                    self.assertEqual((code, error.count("\n")), (4, 1), error)

    def test_huge_names_and_odd_values_of_xml(self):
        """They are only text: nothing breaks, and no line is split."""
        cases = [
            "<testcase name='test_x' classname='test_a' time='1e999'/>",
            "<testcase name='test_x' classname='test_a' time='-inf' line='99999999999999999999'/>",
            f"<testcase name='test_{'y' * 200_000}' classname='{'c.' * 50_000}c' time='nan'/>",
            "<testcase name='../../etc/passwd' classname='' file='../../../etc/passwd' line='-1' time='x'/>",
            "<testcase name='a&#10;b' classname='c&#10;d'><failure message='x&#10;y'/></testcase>",
            "<testcase/>",
        ]
        path = self.root / "odd.xml"
        path.write_text(f"<testsuites><testsuite timestamp='soon'>{''.join(cases)}</testsuite></testsuites>")
        (self.root / "test_a.py").write_text("def test_x(): pass\n")
        for words in (("census", path, "--tests", self.root), ("history", "test_x", path), ("diff", path, path)):
            with self.subTest(words[0]), contextlib.redirect_stdout(io.StringIO()) as out:
                code = main([str(word) for word in words], self.root)
                self.assertEqual(code, 0)
                self.assertNotIn("\x1b", out.getvalue())
                self.assertNotIn("\na\n", out.getvalue())
