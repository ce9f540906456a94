"""instantiate_device_type_tests and the decorators of common_device_type, with the CPU as the only device."""

import unittest

import torch
from notes import note
from torch.testing._internal.common_device_type import (
    deviceCountAtLeast,
    dtypes,
    dtypesIfCPU,
    dtypesIfCUDA,
    instantiate_device_type_tests,
    onlyCPU,
    onlyCUDA,
    onlyNativeDeviceTypes,
    onlyOn,
    precisionOverride,
    skipCPUIf,
    skipCUDAIf,
    skipMeta,
    tol,
    toleranceOverride,
)
from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch.testing._internal.common_utils import TestCase, parametrize, run_tests

NEWER = {
    "NamesTest.test_generated": "2.13",
}


class DeviceTest(TestCase):
    def test_device(self, device):
        note(self, device, self.device_type, type(self).__name__)

    @onlyCPU
    def test_only_cpu(self, device):
        note(self, device)

    @onlyCUDA
    def test_only_cuda(self, device):
        note(self, device)

    @onlyOn(["cpu", "xpu"])
    def test_only_on(self, device):
        note(self, device)

    @onlyNativeDeviceTypes
    def test_native(self, device):
        note(self, device)

    @dtypes(torch.float32, torch.int64)
    def test_dtypes(self, device, dtype):
        note(self, device, dtype)

    @dtypes(torch.float32)
    @dtypesIfCPU(torch.float64)
    def test_dtypes_of_the_cpu(self, device, dtype):
        note(self, dtype)

    @dtypes(torch.float32)
    @dtypesIfCUDA(torch.float64)
    def test_dtypes_of_cuda(self, device, dtype):
        note(self, dtype)

    @skipCPUIf(True, "not on the CPU")
    def test_skip_cpu(self, device):
        note(self, device)

    @skipCPUIf(False, "unused")
    def test_no_skip_cpu(self, device):
        note(self, device)

    @skipCUDAIf(True, "not on CUDA")
    def test_skip_cuda(self, device):
        note(self, device)

    @skipMeta
    def test_skip_meta(self, device):
        note(self, device)

    @deviceCountAtLeast(2)
    def test_two_devices(self, devices):
        note(self, devices)

    @deviceCountAtLeast(1)
    def test_one_device(self, devices):
        note(self, devices)

    @precisionOverride({torch.float32: 0.5})
    @dtypes(torch.float32, torch.float64)
    def test_precision(self, device, dtype):
        note(self, dtype, self.precision, self.rel_tol)

    @toleranceOverride({torch.float32: tol(atol=0.25, rtol=0.125)})
    @dtypes(torch.float32, torch.float64)
    def test_tolerance(self, device, dtype):
        note(self, dtype, self.precision, self.rel_tol)

    @parametrize("x", [1, 2])
    def test_parametrized(self, device, x):
        note(self, device, x)

    @parametrize("x", [1, 2])
    @dtypes(torch.float32)
    def test_parametrized_dtypes(self, device, dtype, x):
        note(self, device, dtype, x)

    @unittest.skip("by unittest")
    def test_skipped(self, device):
        note(self, device)

    @unittest.expectedFailure
    def test_expected(self, device):
        self.fail("as expected")

    def test_fails(self, device):
        self.fail("on purpose")

    def test_get_all_devices(self, device):
        note(self, self.get_all_devices(), self.get_primary_device())

    def test_without_device(self):
        note(self, self.device_type)

    def helper(self):
        return "helper"

    def test_helper(self, device):
        note(self, self.helper())


instantiate_device_type_tests(DeviceTest, globals())


class OnlyForTest(TestCase):
    def test_cpu(self, device):
        note(self, device)


instantiate_device_type_tests(OnlyForTest, globals(), only_for="cpu")


class ExceptForTest(TestCase):
    def test_none(self, device):
        note(self, device)


instantiate_device_type_tests(ExceptForTest, globals(), except_for="cpu")


class HooksTest(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        note(cls, "setUpClass", cls.device_type)

    def setUp(self):
        super().setUp()
        note(self, "setUp", self.device_type)

    def test_one(self, device):
        note(self, device)


instantiate_device_type_tests(HooksTest, globals())


class ProcessTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_in_ranks(self, device):
        note(self, device, self.rank, self.device_type)

    @dtypes(torch.float32, torch.int64)
    def test_dtypes_in_ranks(self, device, dtype):
        note(self, device, dtype)

    @onlyCUDA
    def test_only_cuda_in_ranks(self, device):
        note(self, device)

    def test_fails_in_ranks(self, device):
        raise ValueError(f"on {device}")

    def test_precision_in_ranks(self, device):
        note(self, self.precision, self.rel_tol)


instantiate_device_type_tests(ProcessTest, globals())


class ThreadTest(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_in_threads(self, device):
        note(self, device, self.rank)

    @dtypes(torch.float32)
    def test_dtypes_in_threads(self, device, dtype):
        note(self, dtype, self.precision)


instantiate_device_type_tests(ThreadTest, globals())


class NamesTest(unittest.TestCase):
    def test_generated(self):
        note(self, sorted(name for name in dir(OnlyForTestCPU) if name.startswith("test")))  # noqa: F821

    def test_template_is_gone(self):
        note(self, "DeviceTest" in globals(), "DeviceTestCPU" in globals())

    def test_bases(self):
        note(self, OnlyForTestCPU.__name__, OnlyForTestCPU.__module__ == __name__)  # noqa: F821


if __name__ == "__main__":
    run_tests()
