"""Classes of tests in persistent ranks, which test_continuous.py runs."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import unittest
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import TEST_SKIPS, MultiProcContinuousTest, skip_if_lt_x_gpu

WORLD_SIZE = 3


class Ranks(MultiProcContinuousTest):
    """A base for test subjects, whose methods have names without `test`, so that no loader collects them."""

    world_size = WORLD_SIZE

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def tell(self, value: Any) -> None:
        with open(os.path.join(os.environ["TELL"], str(self.rank)), "a") as file:
            file.write(json.dumps(value) + "\n")


class Things(Ranks):
    def passes(self) -> None:
        dist.barrier()

    def tells_pids(self) -> None:
        self.tell([os.getpid(), self.rank, dist.get_rank(), self.world_size, dist.get_world_size(self.pg)])

    def forks_a_child_that_returns(self) -> None:
        os.fork()

    def tells_numbers(self) -> None:
        self.tell([torch.rand(2).tolist(), random.random()])

    def fails_in_one(self) -> None:
        if self.rank == 1:
            self.fail("as told")
        dist.barrier()

    def raises_in_two(self) -> None:
        if self.rank != 0:
            raise ValueError(f"rank {self.rank}")

    def dies(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def hangs_in_one(self) -> None:
        if self.rank == 1:
            threading.Event().wait()
        dist.barrier()

    def fails_while_another_hangs(self) -> None:
        if self.rank == 1:
            threading.Event().wait()
        if self.rank == 2:
            self.fail("as told")

    def exits(self) -> None:
        if self.rank == 1:
            sys.exit(3)

    def leaves_at_once(self) -> None:
        if self.rank == 1:
            os._exit(0)

    def skips(self) -> None:
        self.skipTest("not today")

    def skips_in_one(self) -> None:
        if self.rank == 1:
            self.skipTest("not today")

    def exits_with_a_skip(self) -> None:
        sys.exit(TEST_SKIPS["nccl"].exit_code)

    @skip_if_lt_x_gpu(1000)
    def needs_devices(self) -> None: ...

    @unittest.expectedFailure
    def fails_as_expected(self) -> None:
        self.fail("as expected")

    def cleanup_fails(self) -> None:
        self.addCleanup(self.fail, "in clean-up")

    def dies_in_clean_up(self) -> None:
        self.addCleanup(os._exit, 3)
        self.fail("as told")

    def subtest_fails(self) -> None:
        with self.subTest(size=2):
            self.fail("within")

    def prints(self) -> None:
        print(f"this is {self._testMethodName}")

    def prints_and_fails(self) -> None:
        print(f"this is {self._testMethodName}")
        self.fail("as told")

    def expects_other_text(self) -> None:
        self.assertExpectedInline(str(self.rank), """0""")

    # Methods that leave global state changed.

    def changes_default_dtype(self) -> None:
        torch.set_default_dtype(torch.float64)

    def changes_default_device(self) -> None:
        torch.set_default_device("meta")

    def changes_deterministic_algorithms(self) -> None:
        if self.rank != 1:
            torch.use_deterministic_algorithms(True)

    def changes_threads(self) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)

    def changes_gradients(self) -> None:
        torch.set_grad_enabled(False)

    def changes_environment(self) -> None:
        os.environ["LEFT_BEHIND"] = "1"
        del os.environ["LOCAL_RANK"]

    def changes_directory(self) -> None:
        os.chdir("/")

    def changes_group(self) -> None:
        dist.destroy_process_group()

    def changes_seed(self) -> None:
        torch.manual_seed(self.rank)
        torch.rand(3)
        random.seed(7)

    def changes_and_fails(self) -> None:
        torch.set_default_dtype(torch.float64)
        self.fail("as told")

    def finds_all_as_it_was(self) -> None:
        self.assertEqual(torch.get_default_dtype(), torch.float32)
        self.assertEqual(torch.empty(0).device.type, "cpu")
        self.assertFalse(torch.are_deterministic_algorithms_enabled())
        self.assertTrue(torch.is_grad_enabled())
        self.assertNotIn("LEFT_BEHIND", os.environ)
        dist.barrier()


class Isolated(Things):
    isolated = True


class InitFails(Things):
    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        if rank == 1:
            raise OSError("no group")
        super()._init_pg(rank, world_size, rdvz_file)


class InitSkips(Things):
    by: BaseException = AssertionError("not told")

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        raise cls.by


class SetUpFails(Things):
    def setUp(self) -> None:
        super().setUp()
        if self._testMethodName == "hangs_in_one":
            raise RuntimeError("after the ranks were told")


class RankIsKilledAfterwards(Things):
    def tearDown(self) -> None:
        super().tearDown()
        if self._testMethodName == "prints":
            self.processes[1].kill()
            self.processes[1].join()


class Poisoned(Things):
    poison_pill = True


class OtherForms(Things):
    """The forms that DTensorTestMixin and instantiate_device_type_tests use."""

    device_type = "cpu"  # type: ignore[assignment]

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return 2


class NoBackend(Things):
    @classmethod
    def backend_str(cls) -> str:
        return "ucc" if not dist.is_ucc_available() else "none"


class SharesDevices(Ranks):
    """Creates its group itself, whatever the backend."""

    @classmethod
    def backend_str(cls) -> str:
        return os.environ["BACKEND_OF_SUBJECT"]

    @classmethod
    def _check_backend(cls) -> None: ...

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        store = dist.FileStore(rdvz_file, world_size)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)

    def tells_the_setting(self) -> None:
        self.tell(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"))
