import json
import sys

import torch
import torch.distributed

from torch_testing_ext.common_utils import TestCase


class Case(TestCase):
    def test_it(self):
        self.assertEqual({"a": torch.ones(2)}, {"a": torch.ones(2)})
        self.assertNotEqual(torch.ones(2), torch.zeros(2))


result = Case("test_it").run()
heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "hypothesis"]
print(json.dumps([result.wasSuccessful(), [name for name in heavy if name in sys.modules]]))
