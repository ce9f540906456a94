"""Docstrings of the package define the thing: they begin with a verb or a noun, not with a headless What or How."""

import unittest
from pathlib import Path

import pytest
from kit.sources import headless_docstrings

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

PACKAGE = Path(torch_testing_ext.__file__).parent


class TestDocstrings(unittest.TestCase):
    @pytest.mark.slow
    def test_no_docstring_is_headless(self):
        found = [
            f"{file.relative_to(PACKAGE.parent)}:{line}: {first}"
            for file in sorted(PACKAGE.rglob("*.py"))
            for line, first in headless_docstrings(file.read_text())
        ]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_headless_docstrings_are_found(self):
        source = '"""What it is."""\nclass A:\n    """How it goes: so."""\n    def f():\n        """Asks."""\n'
        source += "async def g():\n    '''\n    As for h.\n\n    More.'''\ndef h():\n    'Whether it is.'\n"
        source += "def i():\n    'Is it so? It may be.'\ndef j():\n    'Have it done.'\n"
        self.assertEqual(
            list(headless_docstrings(source)),
            [(1, "What it is."), (3, "How it goes: so."), (7, "As for h."), (14, "Is it so? It may be.")],
        )


if __name__ == "__main__":
    run_tests()
