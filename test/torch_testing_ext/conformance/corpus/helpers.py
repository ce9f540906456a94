"""Helpers, flags and decorators of common_utils and common_distributed, in one process."""

import os
import random
import unittest

import numpy as np
import torch
import torch.distributed as dist
from notes import note
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    at_least_x_gpu,
    create_tcp_store,
    get_required_world_size,
    get_timeout,
    requires_gloo,
    requires_nccl,
    requires_ucc,
    simple_sparse_reduce_tests,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import (
    FILE_SCHEMA,
    TemporaryDirectoryName,
    TemporaryFileName,
    TestCase,
    find_free_port,
    freeze_rng_state,
    retry_on_connect_failures,
    run_tests,
    set_default_dtype,
    set_rng_seed,
    skipIfTorchDynamo,
    slowTest,
)


class ConstantsTest(TestCase):
    def test_skip_codes(self):
        note(self, sorted((key, skip.exit_code) for key, skip in TEST_SKIPS.items() if "multi" not in key))

    def test_default_timeout(self):
        note(self, common_distributed.TIMEOUT_DEFAULT, common_distributed.DEFAULT_WORLD_SIZE)

    def test_timeouts(self):
        note(self, get_timeout("a.b.test_ddp_uneven_inputs"), get_timeout("a.b.test_other"))

    def test_file_schema(self):
        note(self, FILE_SCHEMA)

    def test_backends(self):
        note(self, common_distributed.ACCELERATOR_DIST_BACKENDS, common_distributed.DDP_RANK_DEVICES)

    def test_flags(self):
        names = ("TEST_CUDA", "TEST_WITH_ROCM", "TEST_XPU", "TEST_HPU", "TEST_WITH_ASAN", "TEST_WITH_TSAN", "IS_LINUX")
        note(self, [bool(getattr(common_utils, name)) for name in names])

    def test_more_flags(self):
        names = ("IS_WINDOWS", "IS_MACOS", "IS_FBCODE", "IS_SANDCASTLE", "NO_MULTIPROCESSING_SPAWN", "TEST_NUMPY")
        note(self, [bool(getattr(common_utils, name)) for name in names])

    def test_slow_flags(self):
        note(self, bool(common_utils.TEST_WITH_SLOW), bool(common_utils.TEST_SKIP_FAST))

    def test_seed(self):
        note(self, common_utils.SEED)


class GpusTest(TestCase):
    def test_at_least(self):
        note(self, at_least_x_gpu(1), at_least_x_gpu(0))

    def test_exit_code_of_a_skip(self):
        @skip_if_lt_x_gpu(2)
        def needs(self):
            return "called"

        try:
            needs(self)
        except (SystemExit, unittest.SkipTest) as error:
            note(self, getattr(error, "exit_code", None) or error.code)

    def test_allowed_on_the_cpu(self):
        @skip_if_lt_x_gpu(2, allow_cpu=True)
        def needs(self):
            return "called"

        note(self, needs(self))

    def test_keeps_the_name(self):
        @skip_if_lt_x_gpu(2)
        def needs(self):
            """Text."""

        note(self, needs.__name__, needs.__doc__)

    def test_required_world_size(self):
        note(self, get_required_world_size(self, 7))

    @requires_gloo()
    def test_gloo(self):
        note(self, "body")

    @requires_nccl()
    def test_nccl(self):
        note(self, "body")

    @requires_ucc()
    def test_ucc(self):
        note(self, "body")


class RandomTest(TestCase):
    def test_set_rng_seed(self):
        set_rng_seed(5)
        first = (torch.rand(1).item(), random.random(), float(np.random.rand()))
        set_rng_seed(5)
        self.assertEqual(first, (torch.rand(1).item(), random.random(), float(np.random.rand())))

    def test_default_seed(self):
        set_rng_seed()
        note(self, torch.rand(1).item())

    def test_freeze(self):
        with freeze_rng_state():
            first = torch.rand(1)
        self.assertEqual(first, torch.rand(1))


class FilesTest(TestCase):
    def test_temporary_file(self):
        with TemporaryFileName() as name:
            note(self, os.path.exists(name))
        note(self, os.path.exists(name))

    def test_temporary_file_in_text_mode(self):
        with TemporaryFileName(mode="w+") as name:
            note(self, os.path.exists(name))

    def test_temporary_directory(self):
        with TemporaryDirectoryName() as name:
            note(self, os.path.isdir(name))
        note(self, os.path.exists(name))

    def test_temporary_directory_suffix(self):
        with TemporaryDirectoryName(suffix=".end") as name:
            note(self, name.endswith(".end"))


class PortsTest(TestCase):
    def test_free_port(self):
        note(self, 0 < find_free_port() < 65536)

    def test_store(self):
        store = create_tcp_store()
        store.set("key", "value")
        note(self, store.get("key"))

    def test_retry(self):
        calls = []

        @retry_on_connect_failures
        def fails_once():
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("Address already in use")
            return len(calls)

        note(self, fails_once())

    def test_no_retry(self):
        @retry_on_connect_failures
        def fails():
            raise RuntimeError("something else")

        with self.assertRaisesRegex(RuntimeError, "something else"):
            fails()


class ContextsTest(TestCase):
    def test_default_dtype(self):
        with set_default_dtype(torch.float64):
            note(self, torch.get_default_dtype())
        note(self, torch.get_default_dtype())

    def test_default_dtype_after_an_error(self):
        with self.assertRaises(ValueError), set_default_dtype(torch.float64):
            raise ValueError
        note(self, torch.get_default_dtype())


class DecoratorsTest(TestCase):
    @slowTest
    def test_slow(self):
        note(self, "body")

    @skipIfTorchDynamo("not under dynamo")
    def test_not_under_dynamo(self):
        note(self, "body")

    @common_utils.skipIfRocm
    def test_rocm(self):
        note(self, "body")

    @common_utils.skipIfXpu
    def test_xpu(self):
        note(self, "body")

    @common_utils.skipIfHpu
    def test_hpu(self):
        note(self, "body")

    @common_utils.skipIfWindows
    def test_windows(self):
        note(self, "body")

    @common_utils.skip_but_pass_in_sandcastle_if(True, "sandcastle")
    def test_sandcastle(self):
        note(self, "body")

    @unittest.skipIf(common_utils.TEST_WITH_ROCM, "rocm")
    def test_flag_in_skip_if(self):
        note(self, "body")

    @unittest.skipIf(not common_utils.TEST_CUDA, "no cuda")
    def test_flag_negated(self):
        note(self, "body")


class SparseTest(TestCase):
    def test_cases(self):
        for inputs, outputs in simple_sparse_reduce_tests(0, 2, 1):
            note(self, [tuple(one.shape) for one in inputs], [tuple(one.shape) for one in outputs])


class NoGroupTest(TestCase):
    def test_none(self):
        note(self, dist.is_initialized())


if __name__ == "__main__":
    run_tests()
