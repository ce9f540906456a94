import json
import os

import shared  # noqa: F401 (it is read)

import torch_testing_ext.common_distributed as cd

HERE = os.path.dirname(__file__)


class RanksTest(cd.MultiProcessTestCase):
    world_size = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        open(f"{HERE}/fixture.txt").close()

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_in_ranks(self):
        import of_ranks  # noqa: F401 (it is read)

        if self.rank == 1:
            self.assertEqual(json.load(open(f"{HERE}/rank1.json")), 1)
