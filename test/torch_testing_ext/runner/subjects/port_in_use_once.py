import errno
import unittest
from pathlib import Path

import pytest

from torch_testing_ext.common_distributed import MultiProcessTestCase


def bind(name):
    if not Path(name).exists():
        Path(name).touch()
        raise RuntimeError("no server") from OSError(errno.EADDRINUSE, "Adresse wird bereits verwendet")


class Fixture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        bind("fixture")

    def test(self): ...


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test(self):
        if self.rank == 1:
            bind("rank")


@pytest.mark.world_size(2)
def test_marked():
    bind("marked")
