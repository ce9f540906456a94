import contextlib
import os
import sys
import unittest


class Finder:
    def find_spec(self, name, path=None, target=None):
        imported.append((os.getpid(), name))


imported = []
sys.meta_path.insert(0, Finder())

with contextlib.suppress(ImportError):
    # As torch does; but nothing imports its submodule `random`.
    import numpy  # noqa: F401
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase


class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        dist.all_reduce(dist.torch.ones(4))
        dist.destroy_process_group()
        assert not (mine := [name for pid, name in imported if pid == os.getpid()]), mine


for _ in range(2):
    result = unittest.TestResult()
    T("test").run(result)
    assert result.wasSuccessful(), result.errors + result.failures
print("passed")
