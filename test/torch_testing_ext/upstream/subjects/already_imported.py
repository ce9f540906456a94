import sys
import types

import torch.testing._internal.common_distributed as before

from torch_testing_ext.upstream import drop_in, originals


class Plain(before.DistributedTestBase):
    def setUp(self):
        super().setUp()


class Deep(before.MultiProcContinuousTest):
    def wait(self):
        return [(lambda: self._worker_loop()) for _ in range(1)]


class Starts(before.MultiProcessTestCase):
    def _start_processes(self, proc): ...


class Compares(before.TestCase): ...


module = types.ModuleType("torch.testing._internal.invented")
for cls in (Plain, Deep, Starts, Compares):
    cls.__module__ = module.__name__
    setattr(module, cls.__name__, cls)
sys.modules[module.__name__] = module
drop_in.install()

import torch.testing._internal.common_distributed as now

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcessTestCase, TestCase

assert now is not before and now.MultiProcessTestCase is MultiProcessTestCase
assert originals.loaded["torch.testing._internal.common_distributed"] is before
assert Plain.__bases__ == (DistributedTestBase,)
assert Compares.__bases__ == (TestCase,)
assert Deep.__bases__ == (before.MultiProcContinuousTest,), Deep.__bases__
assert Starts.__bases__ == (MultiProcessTestCase,), Starts.__bases__
assert issubclass(before.DynamoDistributedMultiProcTestCase, MultiProcessTestCase) or hasattr(
    now, "DynamoDistributedMultiProcTestCase"
)
print(drop_in.explain())
