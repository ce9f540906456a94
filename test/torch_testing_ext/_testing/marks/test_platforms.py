"""The smaller names of common_distributed: checks of the machine, and bases for tests of the compiler."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_testing_ext import common_distributed
from torch_testing_ext._machine import accelerators
from torch_testing_ext._testing.marks import skips_by_architecture
from torch_testing_ext.common_distributed import (
    DynamoDistributedMultiProcTestCase,
    DynamoDistributedSingleProcTestCase,
    SaveForwardInputsModel,
    core_dumps_disabled,
    evaluate_platform_supports_symm_mem,
    has_efa,
    requires_multicast_support,
    skip_if_rocm_arch_multiprocess,
    skip_if_rocm_ver_atleast_multiprocess,
    skip_if_rocm_ver_lessthan_multiprocess,
    sm_is_or_higher_than,
    tp_transports,
)
from torch_testing_ext.common_utils import TestCase, run_tests


def is_skipped(decorator: Callable[[Any], Any]) -> bool:
    return getattr(decorator(lambda: None), "__unittest_skip__", False)


@contextmanager
def device(arch: str = "gfx942", hip: str | None = None) -> Iterator[None]:
    """Simulate a CUDA device; with `hip`, a ROCm device of this architecture."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.version, "hip", hip))
        stack.enter_context(mock.patch.object(accelerators, "accelerator_type", lambda: "cuda"))
        stack.enter_context(mock.patch.object(skips_by_architecture, "getRocmArchName", lambda: f"{arch}:sramecc+"))
        stack.enter_context(mock.patch.object(skips_by_architecture, "isRocmArchAnyOf", lambda archs: arch in archs))
        yield


class PlatformsTest(TestCase):
    def test_rocm_by_version(self) -> None:
        for decorator in (skip_if_rocm_ver_lessthan_multiprocess, skip_if_rocm_ver_atleast_multiprocess):
            self.assertFalse(is_skipped(decorator((1, 0))))
            self.assertFalse(is_skipped(decorator()))
        with device(hip="6.4.1-abc"):
            self.assertEqual([is_skipped(skip_if_rocm_ver_lessthan_multiprocess(v)) for v in ((6, 4), (7, 0))], [0, 1])
            self.assertEqual([is_skipped(skip_if_rocm_ver_atleast_multiprocess(v)) for v in ((6, 4), (7, 0))], [1, 0])
            self.assertTrue(is_skipped(skip_if_rocm_ver_lessthan_multiprocess()))
            self.assertFalse(is_skipped(skip_if_rocm_ver_atleast_multiprocess()))

    def test_rocm_by_architecture(self) -> None:
        self.assertFalse(is_skipped(skip_if_rocm_arch_multiprocess(("gfx942",))))
        with device(hip="6.4"):
            self.assertTrue(is_skipped(skip_if_rocm_arch_multiprocess(("gfx90a", "gfx942"))))
            self.assertFalse(is_skipped(skip_if_rocm_arch_multiprocess(("gfx90a",))))

    def test_symmetric_memory(self) -> None:
        with mock.patch.object(accelerators, "accelerator_type", lambda: None):
            self.assertFalse(evaluate_platform_supports_symm_mem())
        with device():
            self.assertTrue(evaluate_platform_supports_symm_mem())
        with device(hip="6.4"):
            self.assertTrue(evaluate_platform_supports_symm_mem())
        with device("gfx1100", hip="6.4"):
            self.assertFalse(evaluate_platform_supports_symm_mem())

    def test_multicast(self) -> None:
        with mock.patch.object(accelerators, "accelerator_type", lambda: None):
            self.assertTrue(is_skipped(requires_multicast_support()))
        for there in (True, False):
            answer = {"multicast": there}
            with device(), mock.patch.object(accelerators, "cuda_properties", lambda answer=answer: answer):
                self.assertEqual(is_skipped(requires_multicast_support()), not there)

    def test_compute_capability(self) -> None:
        self.assertTrue(sm_is_or_higher_than(torch.device("cpu"), 99, 0))
        answer = {"capabilities": [[8, 6]]}
        with mock.patch.object(accelerators, "cuda_properties", lambda: answer):
            cuda = torch.device("cuda", 0)
            with device():
                self.assertEqual([sm_is_or_higher_than(cuda, *sm) for sm in ((8, 0), (8, 6), (9, 0))], [1, 1, 0])
            with device(hip="6.4"):
                self.assertFalse(sm_is_or_higher_than(cuda, 8, 0))

    def test_transports_without_infiniband_where_there_is_efa(self) -> None:
        self.addCleanup(has_efa.cache_clear)
        for found, expected in ((None, None), ("true", ["shm", "uv"]), ("false", None)):
            has_efa.cache_clear()
            run = mock.Mock(return_value=mock.Mock(returncode=int(found != "true")))
            with mock.patch("shutil.which", lambda name, found=found: found), mock.patch("subprocess.run", run):
                self.assertEqual(tp_transports(), expected)

    def test_core_dumps_are_off_inside(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_CORE)
        with core_dumps_disabled():
            self.assertEqual(resource.getrlimit(resource.RLIMIT_CORE), (0, before[1]))
        self.assertEqual(resource.getrlimit(resource.RLIMIT_CORE), before)

    def test_models_keep_their_inputs(self) -> None:
        for cast in (True, False):
            inputs: dict[Any, torch.Tensor] = {}
            model = SaveForwardInputsModel(inputs, cast).to(torch.bfloat16 if cast else torch.float32)
            out = model(torch.ones(2, 100))
            self.assertEqual({*inputs}, {model, model.c1, model.c2})
            self.assertEqual(inputs[model].dtype, torch.float32)
            self.assertEqual(out.dtype, inputs[model.c2].dtype)

    def test_re_exported_names(self) -> None:
        exported: dict[str, object] = {}
        exec("from torch_testing_ext.common_distributed import *", exported)
        for name in ("TEST_CUDA", "TEST_XPU", "IS_SANDCASTLE", "HAS_ACCELERATOR"):
            self.assertIsInstance(getattr(common_distributed, name), bool)
            self.assertNotIn(name, exported)
        with self.assertRaisesRegex(AttributeError, "no attribute 'TEST_NOTHING'"):
            _ = common_distributed.TEST_NOTHING


class CompilerTest(DynamoDistributedSingleProcTestCase):
    def test_it_is_a_group_of_one(self) -> None:
        self.assertEqual((dist.get_world_size(), dist.get_rank(), self.rank), (1, 0, 0))
        self.assertEqual(torch.device(self.device).index, 0)

    def test_nothing_is_counted_yet(self) -> None:
        counters = torch._dynamo.utils.counters
        for _ in range(2):
            self.assertEqual(sum(counters["stats"].values()), 0)
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
            self.assertGreater(sum(counters["stats"].values()), 0)
            self.tearDown()
            self.setUp()


class CompilerInRanksTest(DynamoDistributedMultiProcTestCase):
    world_size = 2

    def test_ranks_compile(self) -> None:
        self.create_pg("cpu")
        tensor = torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 4.0))


class NoDevicesTest(TestCase):
    def test_it_skips_without_accelerators(self) -> None:
        class Ranks(DynamoDistributedMultiProcTestCase):
            def test_nothing(self) -> None:
                raise AssertionError("there are no ranks")

        with mock.patch.object(accelerators, "device_count", lambda: 0):
            result = Ranks("test_nothing").run(self.defaultTestResult())
        self.assertEqual([reason for _, reason in result.skipped], ["No accelerator is available"])
        self.assertTrue(result.wasSuccessful())


if __name__ == "__main__":
    run_tests()
