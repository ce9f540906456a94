"""Tests for each type of device: their names, arguments, tolerances and skips, with every kind of base."""

import os
import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_testing_ext import common_device_type as kit
from torch_testing_ext.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch_testing_ext.common_utils import (
    TestCase,
    decorateIf,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)
from torch_testing_ext.distributed._shard.sharded_tensor import ShardedTensorTestBase, with_comms as with_sharded_comms
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_testing_ext.two_tensor import TwoTensor, TwoTensorMode


class FakeTestBase(kit.DeviceTypeTestBase):
    """A type of device that exists for these tests only."""

    device_type = "fake"

    @classmethod
    def get_all_devices(cls) -> list[str]:
        return ["fake:0", "fake:1"]

    @classmethod
    def get_primary_device(cls) -> str:
        return "fake:0"


def instantiate(generic: type, **options: Any) -> dict[str, type]:
    """The classes for CPU and the fake device, by name."""
    scope: dict[str, Any] = {generic.__name__: generic}
    with mock.patch("torch_testing_ext._testing.bases.types_of_device.get_device_type_test_bases") as bases:
        bases.return_value = [kit.CPUTestBase, FakeTestBase]
        kit.instantiate_device_type_tests(generic, scope, **options)
    return scope


def outcomes(cls: type) -> dict[str, str]:
    """How each test of a class ended."""
    ended = {}
    for test in unittest.defaultTestLoader.loadTestsFromTestCase(cls):
        result = unittest.TestResult()
        test.run(result)
        failed = [*result.failures, *result.errors]
        text = (
            failed[0][1].strip().splitlines()[-1] if failed else (result.skipped[0][1] if result.skipped else "passed")
        )
        ended[test._testMethodName] = text
    return ended


class InstantiationTest(TestCase):
    """Classes and tests that a generic class turns into."""

    def test_decorators_of_one_case(self) -> None:
        class TestIt(TestCase):
            @decorateIf(unittest.expectedFailure, lambda params: params["x"] == 1)
            @parametrize("x", [1, 2])
            def test_it(self, device: str, x: int) -> None:
                self.assertNotEqual(x, 1)

            @parametrize("x", [subtest(1, decorators=[unittest.expectedFailure]), subtest(2)])
            def test_subtest(self, device: str, x: int) -> None:
                self.assertNotEqual(x, 1)

        cls = instantiate(TestIt, only_for="cpu")["TestItCPU"]
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(cls).run(result)
        self.assertEqual((result.testsRun, len(result.expectedFailures), result.wasSuccessful()), (4, 2, True))

    def test_names_and_arguments(self) -> None:
        seen: list[Any] = []

        class Generic(TestCase):
            @kit.dtypes(torch.float32, torch.float64)
            @kit.dtypesIfCPU(torch.int8)
            @parametrize("size", [1, 2])
            def test_all(self, device: str, dtype: torch.dtype, size: int) -> None:
                seen.append((device, dtype, size))

            @kit.dtypes((torch.float32, torch.int64))
            def test_pair(self, device: str, dtypes: Any) -> None:
                seen.append(dtypes)

            @kit.deviceCountAtLeast(2)
            def test_many(self, devices: Any) -> None:
                seen.append(devices)

            def test_plain(self) -> None:
                seen.append(self.device_type)  # type: ignore[attr-defined]

        scope = instantiate(Generic)
        self.assertEqual(sorted(scope), ["GenericCPU", "GenericFAKE"])
        self.assertEqual(
            outcomes(scope["GenericCPU"]),
            {
                "test_all_size_1_cpu_int8": "passed",
                "test_all_size_2_cpu_int8": "passed",
                "test_many_cpu": "fewer than 2 devices detected",
                "test_pair_cpu_float32_int64": "passed",
                "test_plain_cpu": "passed",
            },
        )
        self.assertEqual(seen, [("cpu", torch.int8, 1), ("cpu", torch.int8, 2), (torch.float32, torch.int64), "cpu"])
        seen.clear()
        self.assertEqual(len(outcomes(scope["GenericFAKE"])), 7)
        self.assertIn(("fake:0", torch.float64, 2), seen)
        self.assertIn(["fake:0", "fake:1"], seen)

    def test_the_generic_class_is_replaced(self) -> None:
        class Generic(TestCase):
            def test_x(self, device: str) -> None:
                pass

        scope = instantiate(Generic)
        self.assertNotIn("Generic", scope)
        self.assertFalse(hasattr(Generic, "test_x"))

    def test_class_fixtures_of_both(self) -> None:
        calls: list[tuple[str, str]] = []

        class Generic(TestCase):
            @classmethod
            def setUpClass(cls) -> None:
                calls.append(("up", cls.__name__))

            @classmethod
            def tearDownClass(cls) -> None:
                calls.append(("down", cls.__name__))

            def test_x(self, device: str) -> None:
                pass

        [cls] = instantiate(Generic, only_for="cpu").values()
        unittest.defaultTestLoader.loadTestsFromTestCase(cls)(unittest.TestResult())
        self.assertEqual(calls, [("up", "GenericCPU"), ("down", "GenericCPU")])

    def test_only_for_and_except_for(self) -> None:
        class Generic(TestCase):
            def test_x(self, device: str) -> None:
                pass

        def names(**options: Any) -> list[str]:
            return sorted(instantiate(type("Generic", (TestCase,), dict(vars(Generic))), **options))

        self.assertEqual(names(only_for="fake"), ["GenericFAKE"])
        self.assertEqual(names(except_for=("fake",)), ["GenericCPU"])
        with mock.patch.dict(os.environ, {kit.PYTORCH_TESTING_DEVICE_ONLY_FOR_KEY: "fake,cuda"}):
            self.assertEqual(names(), ["GenericFAKE"])
        with mock.patch.dict(os.environ, {kit.PYTORCH_TESTING_DEVICE_EXCEPT_FOR_KEY: "fake"}):
            self.assertEqual(names(), ["GenericCPU"])
        with self.assertRaisesRegex(AssertionError, "both except_for and only_for"):
            names(only_for="cpu", except_for="cpu")

    def test_mistakes_are_refused(self) -> None:
        class OnlyForCpu(TestCase):
            @kit.dtypesIfCPU(torch.int8)
            def test_x(self, device: str, dtype: torch.dtype) -> None:
                pass

        with self.assertRaisesRegex(AssertionError, "@dtypes is mandatory"):
            instantiate(OnlyForCpu)
        with self.assertRaisesRegex(AssertionError, "Unknown dtype"):
            kit.dtypes("float32")
        with self.assertRaisesRegex(AssertionError, "only bytes or GB"):
            kit.largeTensorTest("3MB")
        with self.assertRaisesRegex(AssertionError, "redefinition"):
            kit.dtypes(torch.int8)(kit.dtypes(torch.int8)(lambda self: None))


class DecoratorTest(TestCase):
    """What the decorators do on each type of device."""

    def test_skips_and_expected_failures(self) -> None:
        class Generic(TestCase):
            has_no_unicorn = True

            @kit.onlyCPU
            def test_only(self, device: str) -> None:
                pass

            @kit.skipCPUIf(True, "not here")
            def test_skip(self, device: str) -> None:
                pass

            @kit.skipIf("has_no_unicorn", "by attribute", device_type=("fake", "cuda"))
            def test_attribute(self, device: str) -> None:
                pass

            @kit.expectedFailureCPU
            def test_expected(self, device: str) -> None:
                assert self.device_type != "cpu"  # type: ignore[attr-defined]

            @kit.expectedFailure("fake")
            def test_unexpected(self, device: str) -> None:
                pass

            @kit.onlyAccelerator
            def test_accelerator(self, device: str) -> None:
                pass

            @kit.onlyNativeDeviceTypes
            def test_native(self, device: str) -> None:
                pass

            @kit.largeTensorTest(1 << 60, device="cpu")
            def test_large(self, device: str) -> None:
                pass

        scope = instantiate(Generic)
        self.assertEqual(
            outcomes(scope["GenericCPU"]),
            {
                "test_only_cpu": "passed",
                "test_skip_cpu": "not here",
                "test_attribute_cpu": "passed",
                "test_expected_cpu": "passed",
                "test_unexpected_cpu": "passed",
                "test_accelerator_cpu": "onlyAccelerator: doesn't run on CPU or meta devices",
                "test_native_cpu": "passed",
                "test_large_cpu": "Insufficient cpu memory",
            },
        )
        self.assertEqual(
            outcomes(scope["GenericFAKE"]),
            {
                "test_only_fake": "Only runs on cpu",
                "test_skip_fake": "passed",
                "test_attribute_fake": "by attribute",
                "test_expected_fake": "passed",
                "test_unexpected_fake": "AssertionError: expected test to fail, but it passed",
                "test_accelerator_fake": "passed",
                "test_native_fake": "onlyNativeDeviceTypes: doesn't run on fake",
                "test_large_fake": "Insufficient cpu memory",
            },
        )

    def test_tolerances_hold_for_one_test_only(self) -> None:
        class Generic(TestCase):
            @kit.toleranceOverride({torch.float32: kit.tol(atol=0.1, rtol=0)})
            @kit.dtypes(torch.float32, torch.float64)
            def test_a(self, device: str, dtype: torch.dtype) -> None:
                self.assertEqual(torch.zeros(1, dtype=dtype), torch.full((1,), 0.05, dtype=dtype))

            @kit.precisionOverride({torch.float64: 0.1})
            @kit.dtypes(torch.float32, torch.float64)
            def test_b(self, device: str, dtype: torch.dtype) -> None:
                self.assertEqual(torch.zeros(1, dtype=dtype), torch.full((1,), 0.05, dtype=dtype))

        [cls] = instantiate(Generic, only_for="cpu").values()
        passed = {name: text == "passed" for name, text in outcomes(cls).items()}
        self.assertEqual(
            passed,
            {
                "test_a_cpu_float32": True,
                "test_a_cpu_float64": False,
                "test_b_cpu_float32": False,
                "test_b_cpu_float64": True,
            },
        )


class ProcessesTest(MultiProcessTestCase):
    """Ranks that are processes."""

    world_size = 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @kit.dtypes(torch.float32)
    def test_in_ranks(self, device: str, dtype: torch.dtype) -> None:
        self.assertEqual((device, self.device_type), ("cpu", "cpu"))
        self.assertIn(self.rank, (0, 1))
        self.assertEqual(self.precision, 0)


class ThreadsTest(MultiThreadedTestCase):
    """Ranks that are threads."""

    world_size = 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    @kit.dtypes(torch.float32)
    @kit.precisionOverride({torch.float32: 0.1})
    def test_in_threads(self, device: str, dtype: torch.dtype) -> None:
        self.assertEqual(dist.get_world_size(), 2)
        self.assertEqual(torch.zeros(1), torch.full((1,), 0.05))


class DTensorsTest(DTensorTestBase):
    """Ranks with a group for DTensors."""

    @with_comms
    def test_in_group(self, device: str) -> None:
        self.assertEqual(device, "cpu")
        self.assertEqual(dist.get_world_size(), self.world_size)


class ShardedTest(ShardedTensorTestBase):
    """The base of tests of sharded tensors."""

    @with_sharded_comms(init_rpc=False, backend="gloo")
    def test_in_group(self, device: str) -> None:
        self.assertEqual(dist.get_world_size(), 4)

    @with_sharded_comms(backend="gloo")
    def test_with_rpc(self, device: str) -> None:
        peer = f"worker{(self.rank + 1) % 4}"
        self.assertEqual(dist.rpc.rpc_sync(peer, max, args=(1, 2)), 2)


@instantiate_parametrized_tests
class ShardedSkipTest(TestCase):
    """The decorator of sharded tensors where the backend cannot be used."""

    def test_nccl_needs_a_device_for_each_rank(self) -> None:
        class Test:
            world_size = 1000

        @with_sharded_comms
        def test(self: Any) -> None:
            raise AssertionError("it runs without devices")

        with self.assertRaisesRegex(unittest.SkipTest, "at least 1000 accelerator devices"):
            test(Test())

    @parametrize("backend", ["nccl-legacy", "mpi", "unheard_of"])
    def test_any_backend_but_gloo_needs_devices(self, backend: str) -> None:
        with self.assertRaisesRegex(unittest.SkipTest, "at least 4 accelerator devices"):
            with_sharded_comms(backend=backend)(lambda self: None)(ShardedTensorTestBase())

    def test_a_backend_that_torch_lacks(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "Backend unheard_of not supported"):
            ShardedTensorTestBase().init_pg("unheard_of")


for generic in (ProcessesTest, ThreadsTest, DTensorsTest, ShardedTest):
    kit.instantiate_device_type_tests(generic, globals(), only_for="cpu")
del generic


class TwoTensorTest(TestCase):
    """The tensor subclass that holds two tensors."""

    def test_operations_run_on_both(self) -> None:
        two = TwoTensor(torch.ones(2), torch.zeros(2)) + 1
        self.assertEqual(two.a, torch.full((2,), 2.0))
        self.assertEqual(two.b, torch.ones(2))
        with TwoTensorMode():
            made = torch.ones(3)
        self.assertIsInstance(made, TwoTensor)
        self.assertEqual(made.get_elem_a(), torch.ones(3))

    def test_gradients_and_views(self) -> None:
        two = TwoTensor(torch.ones(2, 2), torch.zeros(2, 2), requires_grad=True)
        (two.view(4) * 3).sum().backward()
        assert isinstance(two.grad, TwoTensor)
        self.assertEqual(two.grad.b, torch.full((2, 2), 3.0))

    def test_compiled(self) -> None:
        def double(tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

        compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
        self.assertEqual(compiled(TwoTensor(torch.ones(2), torch.zeros(2))).a, torch.full((2,), 2.0))

    def test_two_that_differ_are_refused(self) -> None:
        with self.assertRaisesRegex(AssertionError, "a.dtype == b.dtype"):
            TwoTensor(torch.ones(2), torch.ones(2, dtype=torch.float64))


if __name__ == "__main__":
    run_tests()
