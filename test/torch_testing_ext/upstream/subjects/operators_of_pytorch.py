"""A file in the way of PyTorch's test_dtensor_ops: its decorator `ops` and its table of operators, beside our bases."""

import unittest

from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import DecorateInfo, op_db
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter, DTensorOpTestBase

FEW = [op for op in op_db if op.full_name in ("add", "mul", "neg")]


class TestDTensorOps(DTensorOpTestBase):
    world_size = 1  # threads that enter torch's FakeTensorMode at once have crashed

    @ops(FEW, dtypes=OpDTypes.any_one)
    def test_dtensor_op_db(self, dtype, op):
        mesh = init_device_mesh("cpu", (self.world_size,))
        sample = next(iter(op.sample_inputs("cpu", dtype, requires_grad=False)))
        args = (sample.input, *sample.args)
        for dtensors, keywords in DTensorConverter(mesh, args, sample.kwargs):
            self.assertEqual(op(*dtensors, **keywords).full_tensor(), op(*args, **sample.kwargs))


class TestOfADevice(TestCase):
    @ops(FEW, dtypes=OpDTypes.none)
    def test_name(self, device, op):
        self.assertEqual((device, op.full_name), ("cpu", "neg"))


instantiate_device_type_tests(TestDTensorOps, globals(), only_for="cpu")
# As an extension says it of its device: two operators, of which one fails.
base = TestDTensorOpsCPU.__mro__[1]  # noqa: F821
expected = DecorateInfo(unittest.expectedFailure, "TestOfADevice", "test_name")
base.set_test_configs(op_allowlist={"mul", "neg"}, op_overrides={"mul": [expected], "exp": [expected]})
instantiate_device_type_tests(TestOfADevice, globals(), only_for=("cpu",))

if __name__ == "__main__":
    run_tests()
