"""The uses of tensors are reported by compiled programs as by others."""

import json
import unittest

import pytest
from kit.processes import output_of_python

pytestmark = pytest.mark.slow

# Needs an interpreter of its own: it imports the compiler after the mode has begun, as a test may.
PROGRAM = """
import json, sys, warnings
import torch
from torch_testing_ext._torch.operations.tensor_uses import TensorUses
uses = []
with warnings.catch_warnings(record=True) as caught, TensorUses(lambda name, read, written: uses.append(name)):
    warnings.simplefilter("always")
    assert "torch._dynamo" not in sys.modules
    before = torch.ones(3)
    compiled = torch.compile(lambda tensor: (tensor + 1) * 2, backend="eager")
    results = [compiled(before).tolist() for _ in range(2)]
ours = [str(warning.message) for warning in caught if "operation_hook" in f"{warning.message} {warning.filename}"]
print(json.dumps([results, uses, ours]))
"""


class CompiledTest(unittest.TestCase):
    def test_uses_are_the_same_and_there_is_no_warning(self):
        results, uses, warnings = json.loads(output_of_python("-c", PROGRAM).splitlines()[-1])
        self.assertEqual(results, [[4.0] * 3] * 2)
        self.assertEqual(uses, ["aten.ones", *["aten.add.Tensor", "aten.mul.Tensor"] * 2])
        self.assertEqual(warnings, [])


if __name__ == "__main__":
    unittest.main()
