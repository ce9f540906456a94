"""FSDPTest and FSDPTestContinuous: on a machine without accelerators their tests run on two ranks."""

import unittest

from outcomes import outcome

CASE = """
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous

class Subject({base}):
    def test_it(self):
        self.assertEqual(dist.get_world_size(), 2)
        self.assertEqual(dist.get_backend(), "gloo")
        gradients = []
        for wrap in (DistributedDataParallel, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))):
            torch.manual_seed(0)
            model = wrap(torch.nn.Linear(4, 4, bias=False))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.full((2, 4), float(self.rank + 1))).sum().backward()
            optimizer.step()
            gradients.append(model(torch.ones(1, 4)).detach())
        self.assertEqual(*gradients)
"""


class OnCpuTest(unittest.TestCase):
    def test_fsdp_test(self) -> None:
        ended, output = outcome(CASE.format(base="FSDPTest"))
        self.assertEqual(ended, "passed", output)

    def test_fsdp_test_continuous(self) -> None:
        ended, output = outcome(CASE.format(base="FSDPTestContinuous"))
        self.assertEqual(ended, "passed", output)


if __name__ == "__main__":
    unittest.main()
