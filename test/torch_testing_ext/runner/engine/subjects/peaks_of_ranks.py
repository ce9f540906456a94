from torch_testing_ext._torch.devices import cuda_state
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase
from torch_testing_ext.launch import accounts

accounts._state_of_cuda = lambda: cuda_state
cuda_state.peak_memory = lambda: {0: (2**29, 2**30)}


class Fresh(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_fresh(self):
        pass


class Persistent(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_one(self):
        pass

    def test_two(self):
        pass
