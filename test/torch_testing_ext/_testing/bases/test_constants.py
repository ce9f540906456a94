"""Constants of PyTorch's test modules: setting one in the mirror has the effect that it has there."""

from unittest import mock

import torch

from torch_testing_ext import common_distributed, common_fsdp
from torch_testing_ext._machine import accelerators
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.distributed._tensor import common_dtensor


class TestConstants(TestCase):
    def test_of_common_distributed(self):
        class Plain(MultiProcessTestCase):
            def runTest(self): ...

        with mock.patch.object(common_distributed, "DEFAULT_WORLD_SIZE", 3):
            self.assertEqual((Plain().world_size, common_distributed.DEFAULT_WORLD_SIZE), (3, 3))
        with mock.patch("torch_testing_ext.common_distributed.TIMEOUT_DEFAULT", 7):
            self.assertEqual(common_distributed.get_timeout("x"), 7)
        with mock.patch.object(common_distributed, "TIMEOUT_OVERRIDE", {"x": 8}):
            self.assertEqual(common_distributed.get_timeout("a.x"), 8)
        self.assertEqual(
            (Plain().world_size, common_distributed.get_timeout("x")), (4, ranked_test_case.TIMEOUT_DEFAULT)
        )

    def test_of_common_fsdp(self):
        before = (common_fsdp.DEVICE_TYPE, common_fsdp.DEVICE_COUNT, common_fsdp.DISTRIBUTED_BACKEND)
        with mock.patch.multiple(common_fsdp, DEVICE_TYPE="xpu", DEVICE_COUNT=3, DISTRIBUTED_BACKEND="own"):
            self.assertEqual(common_fsdp.get_devtype(), torch.device("xpu"))
            self.assertEqual(common_fsdp.FSDPTest().world_size, 3)
            self.assertEqual(common_fsdp.FSDPTestMultiThread().world_size, 3)
            self.assertEqual(common_fsdp.FSDPTestContinuous.backend_str(), "own")
            self.assertEqual(common_fsdp.FSDPTestContinuous.device_type(), "xpu")
            self.assertEqual(common_fsdp.FSDPTestContinuous._get_world_size("xpu"), 3)
        after = (common_fsdp.DEVICE_TYPE, common_fsdp.DEVICE_COUNT, common_fsdp.DISTRIBUTED_BACKEND)
        self.assertEqual(after, before)

    def test_of_common_dtensor(self):
        with mock.patch.object(common_dtensor, "NUM_DEVICES", 2):
            self.assertEqual(common_dtensor.DTensorTestBase().world_size, 2)
            self.assertEqual(common_dtensor.DTensorOpTestBase().world_size, 2)
        machine = mock.patch.multiple(accelerators, device_count=lambda: 8, accelerator_type=lambda: "cuda")
        with machine, mock.patch.object(common_dtensor, "DEVICE_COUNT", 3):
            self.assertEqual(common_dtensor.DTensorTestBase().device_type, "cpu")
        with machine, mock.patch.object(common_dtensor, "DEVICE_TYPE", "xpu"):
            self.assertEqual(common_dtensor.DTensorTestBase().device_type, "xpu")
        with machine:
            self.assertEqual(common_dtensor.DTensorTestBase().device_type, "cuda")

    def test_setting_one_as_a_test_file_does(self):
        common_fsdp.DEVICE_COUNT = 5
        try:
            self.assertEqual(common_fsdp.FSDPTest().world_size, 5)
        finally:
            del common_fsdp.DEVICE_COUNT
        self.assertNotEqual(common_fsdp.DEVICE_COUNT, 5)


if __name__ == "__main__":
    run_tests()
