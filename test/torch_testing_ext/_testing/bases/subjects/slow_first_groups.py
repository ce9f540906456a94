import unittest

import torch.distributed as dist
from test_first_groups import Groups

from torch_testing_ext import launch
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import start


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
