import fake_cuda
import torch

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests

# at import


class TestIt(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        pass


if __name__ == "__main__":
    # in main
    run_tests()
