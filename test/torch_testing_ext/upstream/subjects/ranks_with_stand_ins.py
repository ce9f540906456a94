import os
import sys
import threading

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class RanksTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_lazily(self):
        import torch.testing._internal.common_utils as common
        from torch.testing._internal.distributed.fake_pg import FakeStore

        assert FakeStore.__module__.startswith("torch_testing_ext"), FakeStore
        assert isinstance(self, common.TestCase)
        assert type(self).__mro__[1].__module__.startswith("torch_testing_ext")
        print("start method:", os.environ.get("TORCH_TESTING_EXT_START", "auto"), file=sys.stderr)

    def test_fails(self):
        self.assertEqual(self.rank, 0)


if __name__ == "__main__":
    if os.environ.get("WITH_A_THREAD"):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    run_tests()
