"""Tests that declare their needs in every way. Nothing runs them: only their needs are read."""

from unittest import TestCase

from torch_testing_ext._testing.marks.needs import ATTRIBUTE, Need
from torch_testing_ext.common_distributed import (
    MultiProcessTestCase,
    MultiThreadedTestCase,
    requires_gloo,
    requires_world_size,
    skip_if_lt_x_gpu,
    skip_if_no_gpu,
)
from torch_testing_ext.distributed._tensor.common_dtensor import LocalDTensorTestBase


class PlainTest(TestCase):
    def runTest(self): ...
    def test_undeclared(self): ...

    @skip_if_lt_x_gpu(2)
    def test_two(self): ...

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_two_or_cpu(self): ...

    @skip_if_no_gpu
    def test_one(self): ...

    @requires_world_size(3)
    def test_world_of_three(self): ...

    @skip_if_lt_x_gpu(8)
    def test_too_many(self): ...

    def test_marked_by_pytorch(self): ...

    test_marked_by_pytorch._min_gpus_required = 2

    @requires_gloo()
    def test_gloo(self): ...

    def test_nccl(self): ...

    setattr(test_nccl, ATTRIBUTE, (Need(lambda: None, backend="nccl"),))


class OnCuda(PlainTest):
    device_type = "cuda"


class OnSecondCuda(PlainTest):
    device_type = "cuda:1"


class OnCPU(PlainTest):
    device_type = "cpu"


class BrokenDeviceType(PlainTest):
    @property
    def device_type(self):
        raise RuntimeError("only in a rank")


class NCCLClass(PlainTest):
    """Decorated as a class."""


setattr(NCCLClass, ATTRIBUTE, (Need(lambda: None, backend="nccl"),))


class Ranks(MultiProcessTestCase):
    world_size = 2

    def test_undeclared(self): ...

    @requires_gloo()
    def test_gloo(self): ...

    @skip_if_lt_x_gpu(3)
    @requires_gloo()
    def test_gloo_on_three(self): ...


class RanksOnCPU(Ranks):
    device_type = "cpu"

    @classmethod
    def of_class(cls): ...


class RanksOnCPUByMethod(Ranks):
    @classmethod
    def device_type(cls):
        return "cpu"


class Threads(MultiThreadedTestCase):
    world_size = 4

    def test_undeclared(self): ...


class LocalRanks(LocalDTensorTestBase):
    world_size = 4

    def test_undeclared(self): ...
