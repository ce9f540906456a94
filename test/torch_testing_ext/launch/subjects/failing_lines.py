import pytest

from torch_testing_ext.common_distributed import MultiProcessTestCase


@pytest.mark.world_size(2)
def test_marked(dist_env):
    here = f"marked {dist_env.rank}"
    assert here


class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_of_a_base(self):
        here = f"base {self.rank}"
        self.assertTrue(here)
