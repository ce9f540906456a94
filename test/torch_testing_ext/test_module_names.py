"""No two modules of the package have one basename: a search for a name finds one file."""

import unittest
from pathlib import Path

from kit.sources import modules_below, shared_basenames

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

PACKAGE = Path(torch_testing_ext.__file__).parent


class TestModuleNames(unittest.TestCase):
    def test_no_two_modules_share_a_basename(self):
        found = shared_basenames(modules_below(PACKAGE))
        lines = (f"{name}: {', '.join(where)}" for name, where in found.items())
        self.assertEqual(found, {}, "\n" + "\n".join(lines))

    def test_shared_basenames_are_found(self):
        modules = {
            "p": "p/__init__.py",
            "p.a": "p/a/__init__.py",
            "p.a.__main__": "p/a/__main__.py",
            "p.a.same": "p/a/same.py",
            "p.b": "p/b/__init__.py",
            "p.b.__main__": "p/b/__main__.py",
            "p.b.same": "p/b/same.py",
            "p.b.other": "p/b/other.py",
            "p.other": "p/other/__init__.py",
        }
        found = shared_basenames({name: Path(file) for name, file in modules.items()})
        self.assertEqual(found, {"same": ["p.a.same", "p.b.same"]})


if __name__ == "__main__":
    run_tests()
