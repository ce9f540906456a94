"""docs/tools/house.py counts what it says, and the package keeps the limits that it has reached."""

import ast
import contextlib
import io
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

import pytest

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import house  # noqa: E402

TOUR = """\
### A rank raises

A text with `launch/c.py`.

| file | what it does here |
| --- | --- |
| `launch/a.py` | It knows `launch/c.py`. |
| `launch/b.py` | |

### A worker is killed

| file | what it does here |
| --- | --- |
| `launch/b.py` | |
"""


def source_of(text, name="launch/a.py"):
    text = textwrap.dedent(text)
    return house.Source(name, text, ast.parse(text))


def counts_of(*texts):
    return house.count(
        [source_of(text, f"launch/{name}.py") for name, text in zip("abcdef", texts, strict=False)], TOUR
    )


class CountsTest(unittest.TestCase):
    def test_aspects(self):
        for text, aspects in (
            ("faults = 1", ["faults"]),
            ("# a fault", ["faults"]),
            ("_faulty = 1", ["faults"]),
            ("default = 1", []),
            ("drills = sweep = 1", ["sweeps"]),
            ("from a.sanitizer import b", ["the sanitizer"]),
            ("x.sanitized = debugger", ["the sanitizer", "the debugger"]),
            ("world_size = 2", []),
            ("worlds = world_size", ["worlds"]),
        ):
            with self.subTest(text):
                counts = counts_of(text, "a = 1")
                found = [aspect for aspect in house.ASPECTS if counts[f"files that name {aspect}"] == 1]
                self.assertEqual(found, aspects)

    def test_stories(self):
        counts = counts_of("a = 1\n", "a = 1\nb = 2\n", "c = 3\n" * 9)
        self.assertEqual(
            (counts["files of the story 'A rank raises'"], counts["lines of the story 'A rank raises'"]), (2, 3)
        )
        self.assertEqual(counts["files of the story 'A worker is killed'"], 1)
        self.assertEqual(counts["lines of the story 'A worker is killed'"], 2)

    def test_attempts(self):
        counts = counts_of("RankAttempt(1)\nRankAttempt(2)", "from a import RankAttempt", "x = RankAttempt()")
        self.assertEqual(counts["modules that make attempts of tests"], 2)

    def test_judges(self):
        method = "    def judge(self, attempt):\n        pass\n"
        other = "    def judge(self, case):\n        pass\n"
        counts = counts_of(f"class Host:\n{method}", f"class A(Host):\n{method}", f"class B(Host):\n{other}")
        self.assertEqual(counts["hosts with a judge of their own"], 1)

    def test_sections(self):
        ruler = "# " + "-" * 100
        text = f"a = 1\n\n{ruler}\n# one\n{ruler}\n\n# -- two\nb = 1  # -- no\n# ----\n"
        self.assertEqual(counts_of(text)["sections under a ruler"], 2)

    def test_global_statements_and_nodes(self):
        # Module, Assign, Name, Store, Constant
        self.assertEqual(counts_of("a = 1\n")["syntax nodes"], 5)
        self.assertEqual(counts_of("def f():\n    global a, b\n    global c\n")["global statements"], 2)

    def test_files_that_know_torch(self):
        sources = [source_of("import torch._C", name) for name in ("_torch/a.py", "a.py", "launch/_torch/b.py")]
        self.assertEqual(house.count(sources, TOUR)["files outside _torch/ that know torch's inside"], 2)

    def test_an_empty_package(self):
        counts = house.count([], "")
        self.assertEqual(set(counts.values()), {0})
        self.assertEqual({*house.LIMITS}, {name for name in counts if "story" not in name}, "every count has a limit")


class CheckTest(unittest.TestCase):
    def test_exceeded(self):
        counts = {"files": 2_000, "lines": 5}
        self.assertEqual([*house.exceeded(counts, {"files": 2_000})], [])
        self.assertEqual([*house.exceeded(counts, {"files": 1_999, "lines": 5})], ["files: 2,000, more than 1,999"])

    def run_main(self, source, *words):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
            Path(folder, "a.py").write_text(source)
            code = house.main([*words, folder])
        return code, out.getvalue()

    def test_main(self):
        many = "def f():\n    global a\n" * 100
        self.assertEqual(self.run_main("a = 1\n", "--check")[0], 0)
        code, out = self.run_main(many, "--check")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"\nglobal statements: 100, more than \d+\n$")
        code, out = self.run_main(many)
        self.assertEqual(code, 0)
        self.assertRegex(out, r"\nglobal statements +100\n")
        self.assertNotIn("more than", out)

    @pytest.mark.slow
    def test_the_package_keeps_its_limits(self):
        counts = house.count(house.read(house.PACKAGE), house.TOUR.read_text(encoding="utf-8"))
        self.assertEqual([*house.exceeded(counts)], [])


if __name__ == "__main__":
    run_tests()
