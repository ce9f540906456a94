"""MultiProcContinuousTest."""

import os
import sys
import unittest

import torch
import torch.distributed as dist
from notes import note
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcContinuousTest, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

STRICTER = {
    "FailsTest.test_2_after_it": ("a test of `MultiProcContinuousTest` fails", "passed"),
    "FailsTest.test_3_later": ("a test of `MultiProcContinuousTest` fails", "passed"),
    "GlobalStateTest.test_2_sees_it": ("its ranks leave global state changed", "passed"),
}
NEWER = {
    "SkipsByExitTest.test_2_after_it": "2.13",
    "SkipsByExitTest.test_4_or_cpu": "2.13",
    "SkipsTest.test_raise_skip": "2.15",
    "SkipsTest.test_skip_test": "2.15",
    "SkipsTest.test_then_passes": "2.15",
}


class Continuous(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"


class GroupTest(Continuous):
    def test_group(self):
        note(self, dist.is_initialized(), dist.get_backend(), dist.get_world_size(), dist.get_rank() == self.rank)

    def test_pg(self):
        note(self, self.pg is dist.group.WORLD)

    def test_rank(self):
        note(self, self.rank, type(self).rank == self.rank, self.world_size)

    def test_collective(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        note(self, tensor.item())

    def test_local_rank(self):
        note(self, os.environ["LOCAL_RANK"])

    def test_rdvz_file(self):
        note(self, self.rdvz_file)

    def test_timeout(self):
        note(self, self.timeout)

    def test_id(self):
        note(self, self.id().rpartition(".")[2])


class SamePersistentRanksTest(Continuous):
    def test_1_leaves_something(self):
        type(self).left = os.getpid()
        note(self, hasattr(self, "left"))

    def test_2_finds_it(self):
        note(self, type(self).left == os.getpid())

    def test_3_seeds(self):
        note(self, torch.rand(1).item())

    def test_4_seeds_again(self):
        note(self, torch.rand(1).item())


class HooksTest(Continuous):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        note(cls, "setUpClass")

    @classmethod
    def tearDownClass(cls):
        note(cls, "tearDownClass")
        super().tearDownClass()

    def setUp(self):
        note(self, "setUp begins", self.rank)
        super().setUp()
        note(self, "setUp ends", self.rank, self.poison_pill, self.world_size)
        self.addCleanup(note, self, "cleanup")

    def tearDown(self):
        note(self, "tearDown")
        super().tearDown()

    def test_one(self):
        note(self, "body")

    def test_two(self):
        note(self, "body")


class FailsTest(Continuous):
    def test_1_raises(self):
        raise ValueError("the first")

    def test_2_after_it(self):
        note(self, "body")

    def test_3_later(self):
        note(self, "body")


class AssertsTest(Continuous):
    def test_asserts(self):
        self.assertEqual(1, 2)


class OneRankFailsTest(Continuous):
    def test_rank_1(self):
        if self.rank == 1:
            raise ValueError("rank 1")


class ExpectedFailureTest(Continuous):
    @unittest.expectedFailure
    def test_fails(self):
        raise ValueError("as expected")


class SkipsTest(Continuous):
    def test_raise_skip(self):
        raise unittest.SkipTest("raised")

    def test_skip_test(self):
        self.skipTest("by skipTest")

    def test_then_passes(self):
        note(self, "body")


class SkipsByExitTest(Continuous):
    def test_1_code(self):
        sys.exit(TEST_SKIPS["importerror"].exit_code)

    def test_2_after_it(self):
        note(self, "body")

    @skip_if_lt_x_gpu(2)
    def test_3_gpus(self):
        note(self, "body")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_4_or_cpu(self):
        note(self, "body")

    @unittest.skip("by unittest")
    def test_5_unittest(self):
        note(self, "body")


class ExitsTest(Continuous):
    def test_sys_exit_3(self):
        sys.exit(3)


class SkipInInitPgTest(Continuous):
    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        dist.init_process_group("gloo", init_method=f"file://{rdvz_file}", rank=rank, world_size=world_size)
        sys.exit(TEST_SKIPS["no_accelerator"].exit_code)

    def test_one(self):
        note(self, "body")

    def test_two(self):
        note(self, "body")


class OwnInitPgTest(Continuous):
    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        super()._init_pg(rank, world_size, rdvz_file)
        cls.other = dist.new_group([0, 1])

    def test_both(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=self.other)
        note(self, tensor.item())


class RunTestGivenIdTest(Continuous):
    @classmethod
    def _run_test_given_id(cls, test_id, **kwargs):
        cls.seen = test_id.rpartition(".")[2]
        super()._run_test_given_id(test_id, **kwargs)

    def test_seen(self):
        note(self, self.seen)


class SkipInSetUpTest(Continuous):
    def setUp(self):
        self.skipTest("before the ranks")

    def test_one(self):
        note(self, "body")


class SkipInSetUpClassTest(Continuous):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("in setUpClass")

    def test_one(self):
        note(self, "body")


class PropertyTest(MultiProcContinuousTest):
    """world_size and device_type as properties."""

    @property
    def world_size(self):
        return 2

    @world_size.setter
    def world_size(self, value):
        pass

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_size(self):
        note(self, dist.get_world_size())


class StringDeviceTest(MultiProcContinuousTest):
    world_size = 1
    device_type = "cpu"

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_device(self):
        note(self, self.device_type)


class DefaultBackendTest(MultiProcContinuousTest):
    world_size = 1

    def test_backend(self):
        note(self, dist.get_backend_config())


class MissingBackendTest(MultiProcContinuousTest):
    world_size = 1

    @classmethod
    def backend_str(cls):
        return "nccl" if not dist.is_nccl_available() else "mpi"

    def test_skips(self):
        note(self, "body")


class ParametrizedTest(Continuous):
    @parametrize("number", [1, 2])
    def test_number(self, number):
        note(self, number)


instantiate_parametrized_tests(ParametrizedTest)


class PoisonedTest(Continuous):
    poison_pill = True

    def test_skipped(self):
        note(self, "body")


class GlobalStateTest(Continuous):
    def test_1_leaves_it(self):
        torch.set_default_dtype(torch.float64)

    def test_2_sees_it(self):
        note(self, torch.get_default_dtype())


if __name__ == "__main__":
    run_tests()
