"""A test beside files that have the names of Python's modules: it makes them."""

import importlib
import multiprocessing
import os
import sys
import unittest

import torch.distributed

# These need much of the library, as plain tests do.
PLAIN = (multiprocessing, torch.distributed, unittest)


def hide(name, text):
    with open(os.path.join(sys.path[0], f"{name}.py"), "w") as file:
        file.write(text)


here = {name.partition(".")[0] for name in sys.modules} | {*sys.builtin_module_names}
for name in sys.stdlib_module_names - here:
    hide(name, f"raise RuntimeError('{name}.py was imported')")
for name in ("array", "expecttest", "fcntl", "resource"):
    hide(name, "mine = True")
importlib.invalidate_caches()
for name in ("array", "fcntl"):
    sys.modules.pop(name, None)
    __import__(name)

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


class Case(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_rank(self):
        for name in ("array", "expecttest", "fcntl", "resource"):
            self.assertTrue(importlib.import_module(name).mine)
        with self.assertRaisesRegex(RuntimeError, "shlex.py was imported"):
            importlib.import_module("shlex")
        self.assertExpectedInline("text", "text")


run_tests()
