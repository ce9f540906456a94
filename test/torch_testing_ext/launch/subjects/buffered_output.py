import sys

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


class TestIt(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        sys.stdout.write("only once ")  # no newline, no flush
        self._spawn_processes()

    def test_it(self):
        pass


if __name__ == "__main__":
    run_tests()
