import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from kit.ranks import Ranks

from torch_testing_ext import launch
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import start

TIMEOUT = timedelta(seconds=60)


class Groups(Ranks):
    def splits_and_merges(self):
        """Into groups of one: on torch 2.13, ranks that connect in split_group may wait in vain, in any process."""
        self.join_group()
        parts = [dist.group.WORLD.split_group([rank], TIMEOUT) for rank in range(2)]
        self.assertEqual([part is None for part in parts], [self.rank == 1, self.rank == 0])
        merged = parts[self.rank].merge_remote_group(dist.HashStore(), 1, TIMEOUT)
        merged.allreduce([tensor := torch.ones(1)]).wait()
        self.assertEqual((merged.size(), tensor.item()), (1, 1))


class A(Groups):
    test_splits_and_merges = Groups.splits_and_merges

    def tearDown(self):
        print("method:", start.launcher().server.method.value)
        super().tearDown()


class B(unittest.TestCase):
    def test_makes_a_group(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        launch.close()  # the server of A was started before


class C(A): ...


class D(unittest.TestCase):
    def test_only_this_process_has_the_class(self):
        class Local(Groups):
            def passes(self): ...

        launch.close()
        result = unittest.TestResult()
        Local("passes").run(result)
        self.assertTrue(result.wasSuccessful(), result.errors)
        print("method:", start.launcher().server.method.value)


if __name__ == "__main__":
    run_tests()
