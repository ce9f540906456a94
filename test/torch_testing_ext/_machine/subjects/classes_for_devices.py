import fake_cuda

from torch_testing_ext._machine import accelerators
from torch_testing_ext.common_device_type import instantiate_device_type_tests
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


class TestIt(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        assert accelerators.unsafe_to_fork() is None
        self._spawn_processes()

    def test_it(self, device):
        assert device == "cuda:0" and not self.no_magma and self.has_cudnn()
        assert self.cudnn_version == 91002

    def test_fails(self, device):
        raise RuntimeError("of the test")


instantiate_device_type_tests(TestIt, globals(), only_for="cuda")

if __name__ == "__main__":
    run_tests()
