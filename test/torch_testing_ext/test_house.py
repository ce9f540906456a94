"""docs/tools/house.py counts what it says, and the package keeps the limits that it has reached."""

import ast
import contextlib
import io
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from typing import ClassVar

import pytest

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import house  # noqa: E402


def source_of(text, name="launch/a.py"):
    text = textwrap.dedent(text)
    return house.Source(name, text, ast.parse(text))


def counts_of(*texts):
    return house.count([source_of(text, f"launch/m{number}.py") for number, text in enumerate(texts)]).counts


class CountsTest(unittest.TestCase):
    def test_files_and_lines(self):
        counts = counts_of("a = 1\n", "a = 1\nb = 2\n\n")
        self.assertEqual((counts["files"], counts["lines"], counts["lines a file"]), (2, 4, 2.0))
        self.assertEqual(counts["lines of the longest file"], 3)

    def test_imports_wherever_they_are(self):
        counts = counts_of(
            """\
            import os, sys
            from a import (
                b,
                c,
            )

            def f():
                from . import late
                return "import os"

            """
        )
        self.assertEqual(counts["imports per 1,000 lines"], 300.0)

    def test_lines_of_code(self):
        text = '''\
            """The module.

            More of it.
            """

            # a comment
            a = 1  # at the end of a line


            class C:
                """The class."""

                def f(self):
                    """The function."""
                    return """a string
                    that is no docstring"""
            '''
        self.assertEqual([*house.code_of(source_of(text))], [7, 10, 13, 15, 16])

    def test_nodes_on_a_line(self):
        # Module, Assign, Name, Store, Constant
        self.assertEqual(counts_of("a = 1\n")["nodes on a line of code"], 5.0)
        # One node for the module, four for each assignment.
        self.assertEqual(counts_of("a = 1\n\n# why\nb = 2\n")["nodes on a line of code"], 4.5)

    def test_rooms(self):
        for name, room in (
            ("launch/in_rank.py", "launch"),
            ("runner/report/text.py", "runner"),
            ("_process/__init__.py", "_process"),
            ("common_utils.py", house.MIRROR),
            ("two_tensor.py", house.MIRROR),
            ("hypothesis_utils.py", house.MIRROR),
            ("ranks.py", house.MIRROR),
            ("distributed/_tensor/common_dtensor.py", house.MIRROR),
            ("__init__.py", None),
            ("__main__.py", None),
            ("pytest_plugin.py", None),
        ):
            with self.subTest(name=name):
                self.assertEqual(source_of("", name).room, room)
        names = ("a/x.py", "a/y.py", "b/x.py", "common_utils.py", "distributed/x.py", "__init__.py")
        found = house.count([source_of("", name) for name in names])
        self.assertEqual((found.rooms, found.counts["rooms"]), (["PyTorch's names", "a", "b"], 3))

    def test_an_empty_package(self):
        self.assertEqual(set(house.count([]).counts.values()), {0})


class LargeTest(unittest.TestCase):
    def large(self, text):
        return [*house.large_in(source_of(text))]

    def test_methods(self):
        methods = "".join(f"    def m{number}(self): ...\n" for number in range(20))
        self.assertEqual(self.large(f"class C:\n{methods}"), [])
        more = f"class C:\n{methods}    async def one_more(self): ...\n"
        self.assertEqual(self.large(more), ["launch/a.py:1 C: 21 methods, 0 attributes"])

    def test_attributes(self):
        fields = "".join(f"    f{number}: int = 0\n" for number in range(6))
        assigned = "".join(f"        self.a{number} = self.a{number}, x.other = 0, 1\n" for number in range(6))
        init = f"    def __init__(self, x):\n{assigned}"
        self.assertEqual(self.large(f"class C:\n{fields}{init}"), [])
        late = "    def later(self):\n        with x as self.thirteenth: pass\n"
        self.assertEqual(self.large(f"class C:\n{fields}{init}{late}"), ["launch/a.py:1 C: 2 methods, 13 attributes"])

    def test_functions(self):
        body = "    x = 1\n" * 44
        self.assertEqual(self.large(f"def f():\n{body}"), [])
        self.assertEqual(self.large(f"# above\n@decorated\ndef f():\n{body}    y = 1\n"), ["launch/a.py:3 f: 46 lines"])


class CheckTest(unittest.TestCase):
    LIMITS: ClassVar = {"files": 1, "rooms": 1, "nodes on a line of code": 5}

    def test_exceeded(self):
        kept = house.count([source_of("a = 1\n")])
        self.assertEqual([*house.exceeded(kept, self.LIMITS)], [])
        two = house.count([source_of("a = 1\n"), source_of("a = b.c(1, 2)\n", "runner/b.py")])
        self.assertEqual(
            [*house.exceeded(two, self.LIMITS)],
            [
                "files: 2, more than 1",
                "rooms: 2, more than 1",
                "nodes on a line of code: 8, more than 5",
            ],
        )

    def test_limits_name_counts(self):
        counts = house.count([]).counts
        self.assertEqual(house.LIMITS.keys() - set(counts), set())

    def run_main(self, source, *words):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
            Path(folder, "dense.py").write_text(source)
            code = house.main([*words, folder])
        return code, out.getvalue()

    def test_main(self):
        dense = "a = [b(c, d), e.f[g]]\n" * 800
        self.assertEqual(self.run_main("a = 1\n" * 800, "--check")[0], 0)
        code, out = self.run_main(dense, "--check")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"\nnodes on a line of code: [\d.]+, more than 9.9\n")
        code, out = self.run_main(dense)
        self.assertEqual(code, 0)
        self.assertIn("files: 1\nlines: 800\n", out)
        self.assertNotIn("more than 9.9", out)

    @pytest.mark.slow
    def test_the_package_keeps_its_limits(self):
        self.assertEqual([*house.exceeded(house.count(house.read(house.PACKAGE)))], [])


if __name__ == "__main__":
    run_tests()
