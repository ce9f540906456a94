import os

import pytest
from sums import sign

from torch_testing_ext.common_distributed import MultiProcessTestCase


def test_plain():
    of_plain = 2 + 2
    assert of_plain == 5


@pytest.mark.world_size(2)
def test_signs(dist_env):
    assert sign(dist_env.rank) == dist_env.rank


@pytest.mark.world_size(2)
def test_hangs(ranks):
    while True:
        pass


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_fails(self):
        of_ranks = 1 + 2
        self.assertEqual(of_ranks, 4)

    def test_leaves(self):
        os._exit(3)
