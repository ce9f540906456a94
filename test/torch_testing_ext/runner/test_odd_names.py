"""Paths and tests with odd names run, and the commands that are printed to rerun them work in a shell."""

import json
import os
import re
import subprocess
import unittest

import pytest
from kit.files import FolderCase
from kit.invented import make_test
from kit.processes import ROOT, clean_environ
from kit.warm import run_warm

from torch_testing_ext._process import shell_words
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.scheduling.selection import Selection

pytestmark = pytest.mark.slow

NOT_UTF8 = os.fsdecode(b"\xff\xfe")
FOLDERS = (
    "/".join(["long" * 15] * 5),
    "a blank",
    "it's",
    'a "quote" $HOME `id`',
    "two\nlines",
    NOT_UTF8,
    "-dash",
    "per%cent%s",
    "üñí",
    "a::b",
    "[x]",
    "dots.in.it",
    "back\\slash",
    "*star?{brace}",
    "semi;colon&",
)
FILES = ("test_" + "y" * 240, "test_a blank", "test_a::b", "test_" + NOT_UTF8, "test_-dash")
TESTS = (
    "a::b",
    "[b c]",
    "it's",
    'a "quote" $HOME `id`',
    "two\nlines",
    "üñ",
    NOT_UTF8,
    "*?",
    "a;b|c&d",
    "#",
    "\x1b[31m",
    "(x)",
    "::",
    "~!\\",
)
# The console is strict about what it can encode.
STRICT = b'import sys\n\nsys.stdout.reconfigure(encoding="utf-8", errors="strict")\n'
ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SOURCE = """
import unittest
class T(unittest.TestCase):
    def test_it(self): self.fail("on purpose")
"""

AGAIN = re.compile(r"^run again:  python3? run_test\.py (.*)$", re.MULTILINE)


class OddNamesCase(FolderCase):
    def setUp(self):
        super().setUp()
        (self.root / "run_test.py").write_bytes(STRICT + (ROOT / "run_test.py").read_bytes())
        self.words = self.root / "words"
        python = self.root / "bin/python"
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shell_words.quote(str(self.words))}\n")
        python.chmod(0o755)

    def write(self, name, source=SOURCE):
        return super().write(name, source)

    def bash(self, command, code=1):
        """The output of a command in the project's folder. If it starts Python, that gets its words in a warm fork."""
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        environ = clean_environ(PATH=path)
        self.words.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.root, env=environ, stdin=subprocess.DEVNULL, capture_output=True
        )
        out, errors, returncode = os.fsdecode(done.stdout), done.stderr.decode(), done.returncode
        if self.words.exists():
            self.assertEqual((out, errors, returncode), ("", "", 0), command)
            words = os.fsdecode(self.words.read_bytes()).split("\0")[:-1]
            run = run_warm(*words, cwd=self.root, env=environ)
            out, errors, returncode = run.stdout, run.stderr, run.returncode
        self.assertEqual(returncode, code, f"{command}\n{out}{errors}")
        return out

    def ran(self, command):
        """The results of a run, by name."""
        self.bash(f"{command} --results results.json --junitxml x.xml --html x.html --perfetto trace.json")
        return {test["id"]: test for test in json.loads((self.root / "results.json").read_text())["tests"]}

    def check(self, tests):
        """All tests run, and the command that is printed for each runs it and no other."""
        ran = self.ran("python run_test.py")
        self.assertEqual(set(ran), set(tests))
        titles = {test["attempts"][0]["message"].partition("\n")[0] for test in ran.values()}
        self.assertEqual(titles, {"AssertionError: on purpose"})
        found = {name: AGAIN.findall(test["attempts"][0]["message"]) for name, test in ran.items()}
        words = {name: commands[0] for name, commands in found.items()}
        arguments = self.bash(f"printf '%s\\0' {' '.join(words.values())}", code=0).split("\0")[:-1]
        known = [make_test(*parts_of(name)) for name in words]
        files = sorted({test.id.file for test in known})
        for name, argument in zip(words, arguments, strict=True):
            with self.subTest(name=name):
                selection = Selection.of(Options(names=(argument,)), self.root, self.root)
                self.assertEqual([str(test.id) for test in selection.tests(known, files)], [name])
        odd = {name: word for name, word in words.items() if word.startswith(("'", "$"))}
        self.assertEqual(set(self.ran(f"python run_test.py {' '.join(odd.values())}")), set(odd))


def parts_of(name):
    """The method, file and class of a test of these projects, for make_test."""
    file, _, method = name.partition("::T::")
    return method, file, "T"


class OddNamesTest(OddNamesCase):
    maxDiff = None

    def test_paths_and_tests(self):
        names = [f"{folder}/test_x.py" for folder in FOLDERS] + [f"{file}.py" for file in FILES]
        for name in names:
            self.write(f"test/distributed/{name}")
        lines = [f'setattr(T, {"test_" + name!a}, lambda self: self.fail("on purpose"))\n' for name in TESTS]
        self.write("test/distributed/test_x.py", "import unittest\nclass T(unittest.TestCase): pass\n" + "".join(lines))
        self.check(
            [f"test/distributed/{name}::T::test_it" for name in names]
            + [f"test/distributed/test_x.py::T::test_{name}" for name in TESTS]
        )

    def test_the_printed_command_for_all(self):
        self.write("-tests/a 'b'/test_x.py")
        out = self.bash("python run_test.py -o tests=.")
        self.assertIn("0 passed, 1 failed", out)
        lines = out.splitlines()
        command = lines[lines.index("to rerun it:") + 1]
        self.assertEqual(list(self.ran(f"{command} -o tests=.")), ["-tests/a 'b'/test_x.py::T::test_it"])

    def test_lists(self):
        """One line for each test, on a console that is strict about what it can encode."""
        self.write(f"test/distributed/{NOT_UTF8}\nb/test_x.py")
        shown = "test/distributed/\\udcff\\udcfe\\nb/test_x.py::T::test_it"
        self.assertEqual(self.bash("python run_test.py --list", code=0).splitlines(), [shown, "1 test"])

    def test_paths_that_pytest_reads_as_names_of_tests(self):
        """pytest itself runs the tests of such a folder, though not by their path."""
        source = """
            import pytest
            @pytest.mark.world_size(1)
            def test_marked(): pass
            class TestIt:
                @pytest.mark.parametrize("value", ["[x]::y"])
                def test_value(self, value): pass
        """
        # A project with hooks of its own collects twice.
        self.write("test/distributed/conftest.py", "def pytest_sessionstart(): pass\n")
        files = [f"test/distributed/{name}.py" for name in ("[x]/test_x", "a::b/test_y", "test_[z]")]
        for file in files:
            self.write(file, source)
        self.bash("python run_test.py --results results.json", code=0)
        ran = [test["id"] for test in json.loads((self.root / "results.json").read_text())["tests"]]
        names = ("test_marked", "TestIt::test_value[[x]::y]")
        self.assertEqual(sorted(ran), sorted(f"{file}::{name}" for file in files for name in names))

    def test_a_dot_in_the_name_of_a_file(self):
        """It separates packages for pytest, but not for unittest's loader."""
        self.write("test/distributed/test_dot.ted.py")
        self.assertEqual(set(self.ran("python run_test.py")), {"test/distributed/test_dot.ted.py"})
        by_unittest = self.ran("python run_test.py -o loader=unittest")
        self.assertEqual(set(by_unittest), {"test/distributed/test_dot.ted.py::T::test_it"})

    def test_a_terminal_of_ascii(self):
        """What it cannot show has numbers."""
        strict = STRICT.replace(b"utf-8", b"ascii")
        (self.root / "run_test.py").write_bytes(strict + (ROOT / "run_test.py").read_bytes())
        self.write("test/distributed/test_x.py", SOURCE.replace("test_it", "test_grüße"))
        shown = r"test/distributed/test_x.py::T::test_gr\xfc\xdfe"
        self.bash("python run_test.py")
        self.assertEqual(self.bash("python run_test.py --list", code=0).splitlines(), [shown, "1 test"])
        self.assertIn(r"test_gr\xfc\xdfe", self.bash("python run_test.py show", code=0))

    def test_a_locale_of_ascii(self):
        """Names that the locale cannot encode go through variables, files and hashes as they are."""
        self.write("test/distributed/test_x.py", SOURCE.replace("test_it", "test_grüße"))
        # pytest itself puts the name of a test into a variable, and fails.
        words = ("--shuffle", "--results=results.json", "-o", "loader=unittest")
        run = run_warm("run_test.py", *words, cwd=self.root, env=clean_environ(**ASCII))
        self.assertEqual((run.stderr, run.returncode), ("", 1), run.stdout)
        (test,) = json.loads((self.root / "results.json").read_text())["tests"]
        self.assertEqual(test["id"], "test/distributed/test_x.py::T::test_grüße")
        self.assertIn("AssertionError: on purpose", test["attempts"][0]["message"])


if __name__ == "__main__":
    unittest.main()
