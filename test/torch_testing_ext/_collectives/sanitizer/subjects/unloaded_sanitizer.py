import torch
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
        dist.all_reduce(torch.ones(4))
        self.check()

    def tearDown(self):
        super().tearDown()
        self.check()

    def check(self):
        import sys

        from torch_testing_ext.common_distributed import MultiThreadedTestCase  # noqa: F401 (imported last)

        names = (
            "sanitized_rank",
            "sanitizer_log",
            "tensor_checks",
            "watched_works",
            "sanitizer_kinds",
            "operation_hook",
        )
        loaded = {name for name in names if any(module.endswith(f".{name}") for module in sys.modules)}
        # The parent may have looked for a mismatch meanwhile, which imports the reader of logs.
        assert loaded - {"sanitizer_log"} == {"sanitizer_kinds"}, loaded


if __name__ == "__main__":
    run_tests()
