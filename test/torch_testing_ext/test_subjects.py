"""Code that tests run as their subject is in files, which linters read and editors open, and not in long strings."""

import ast
import re
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_testing_ext.common_utils import run_tests

TESTS = Path(__file__).parent
MOST_LINES = 22
CODE = re.compile(r"^\s*(import|from|def|class|async def) \w", re.MULTILINE)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """The first line and the lines of each string that is no docstring and no part of another string."""
    lines = source.splitlines()
    nodes = [ast.parse(source)]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno])
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            nodes += ast.iter_child_nodes(node)


class SubjectsTest(unittest.TestCase):
    @pytest.mark.slow
    def test_no_long_code_in_strings(self) -> None:
        """CONTRIBUTING.md, "Helpers of tests", says where it goes."""
        newline = "\n"
        long = [
            f"{path.relative_to(TESTS)}:{line}: {text.count(newline)} lines"
            for path in sorted(TESTS.rglob("*.py"))
            if path.resolve() == path
            for line, text in strings(path.read_text(encoding="utf-8"))
            if text.count(newline) > MOST_LINES and CODE.search(text)
        ]
        self.assertEqual(long, [])

    def test_nothing_collects_subjects(self) -> None:
        """pytest and run_test.py would import and run files with such names."""
        files = [path for folder in TESTS.rglob("subjects") for path in folder.rglob("*.py")]
        self.assertGreater(len(files), 50)
        self.assertEqual([str(path) for path in files if re.search(r"^test_|_test$", path.stem)], [])

    def test_strings(self) -> None:
        source = '"""Of the module."""\nx = """\nimport os\n"""\ny = [f"""\n{x}\n\nclass A:\n"""]\n'
        self.assertEqual([(line, text.count("\n")) for line, text in strings(source)], [(2, 2), (5, 4)])
        self.assertEqual([bool(CODE.search(text)) for _, text in strings(source)], [True, True])
        self.assertIsNone(CODE.search("an important class\nand an import of it\n"))


if __name__ == "__main__":
    run_tests()
