import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        from torch_testing_ext._collectives.sanitizer import operation_checks

        delays = []
        operation_checks.Delays.sleep = delays.append
        for _ in range(20):
            dist.barrier()
        if self.rank == 0:
            raise AssertionError(f"delays {delays}")


if __name__ == "__main__":
    run_tests()
