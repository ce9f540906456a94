from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_memory, requires_sm, skip_if_lt_x_gpu


class T(MultiProcessTestCase):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_four(self):
        pass

    @requires_memory("20 GB")
    @requires_sm(9)
    @skip_if_lt_x_gpu(1)
    def test_large(self):
        pass
