"""Classes for FSDP that override how a rank runs: they decide about devices, not the parent."""

import sys
import unittest
from unittest import mock

import torch
import torch.distributed as dist

from torch_testing_ext import common_fsdp
from torch_testing_ext.common_distributed import TEST_SKIPS, MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_fsdp import FSDPTest, FSDPTestContinuous, FSDPTestMixin
from torch_testing_ext.common_utils import TestCase, run_tests


class OwnRun(FSDPTest):
    """Runs on the CPU with gloo, as a backend of another vendor would on its device.

    Methods have names without `test`, so that no loader collects them.
    """

    @property
    def world_size(self):
        return 2

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        dist.init_process_group("gloo", init_method=self.init_method, world_size=self.world_size, rank=rank)
        dist.barrier()
        self.run_test(test_name, pipe)
        dist.barrier()
        dist.destroy_process_group()

    def passes(self):
        self.assertEqual(self.process_group.size(), 2)

    @skip_if_lt_x_gpu(1000)
    def needs_devices(self): ...

    def fails(self):
        self.fail("it was run")

    def fails_in_one(self):
        self.assertEqual(self.rank, 0)

    def skips_in_one(self):
        if self.rank == 0:
            self.skipTest("here only")


class OwnRunOfBase(OwnRun):
    """Inherits it."""


class CallsOurs(FSDPTest):
    """Pretends to have devices around our `_run`, as tests on the CPU do."""

    world_size = 2
    pretended = 2

    @classmethod
    def _run(cls, *args, **kwargs):
        with mock.patch("torch.accelerator.device_count", return_value=cls.pretended):
            super()._run(*args, **kwargs)

    fails = OwnRun.fails


class CallsOursWithoutDevices(CallsOurs):
    pretended = 1


class SetsConstants(FSDPTest):
    """Sets the constants in its ranks, then runs ours."""

    world_size = 2

    @classmethod
    def _run(cls, *args, **kwargs):
        common_fsdp.DISTRIBUTED_BACKEND = "cpu:gloo"
        common_fsdp.DEVICE_TYPE = "cpu"
        with mock.patch("torch.accelerator.device_count", return_value=2):
            super()._run(*args, **kwargs)

    def backend_is_ours(self):
        raise KeyError(dist.get_backend_config(), str(common_fsdp.get_devtype()))


class Exits(FSDPTest):
    world_size = 2

    @classmethod
    def _run(cls, *args, **kwargs):
        sys.exit(TEST_SKIPS["nccl"].exit_code)

    fails = OwnRun.fails


class Plain(FSDPTest):
    world_size = 2

    fails = OwnRun.fails


class OwnGroup(FSDPTestContinuous):
    """Makes its group with gloo on the CPU."""

    world_size = 2

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        dist.init_process_group("gloo", store=dist.FileStore(rdvz_file, world_size), rank=rank, world_size=world_size)
        cls.pg = dist.group.WORLD

    def passes(self):
        self.assertEqual(self.process_group.size(), 2)

    fails = OwnRun.fails


class CallsOurGroup(FSDPTestContinuous):
    world_size = 2

    @classmethod
    def _init_pg(cls, *args):
        super()._init_pg(*args)

    fails = OwnRun.fails


def run(test):
    result = unittest.TestResult()
    test.run(result)
    found = (("error", result.errors), ("failed", result.failures), ("skipped", result.skipped))
    return next(((outcome, entries[0][1]) for outcome, entries in found if entries), ("passed", ""))


@unittest.skipIf(torch.accelerator.device_count(), "on a machine with accelerators, ours do not skip")
class TestWithoutDevices(TestCase):
    def expect(self, test, outcome, message="^"):
        seen = run(test)
        self.assertEqual(seen[0], outcome, seen[1])
        self.assertRegex(seen[1], message)

    def test_without_an_override_nothing_is_started(self):
        with mock.patch("torch_testing_ext.launch.launch", side_effect=AssertionError("launched")):
            self.expect(Plain("fails"), "skipped", "No accelerator")

    def test_an_overriding_run_is_called(self):
        for kind in (OwnRun, OwnRunOfBase):
            self.expect(kind("passes"), "passed")
            self.expect(kind("fails"), "failed", "it was run")
        self.expect(OwnRun("fails_in_one"), "failed", "rank 1 of 2 failed")
        self.assertIn(run(OwnRun("skips_in_one"))[0], ("failed", "error"))
        self.expect(OwnRun("needs_devices"), "skipped", "at least 1000")

    def test_it_may_call_ours(self):
        self.expect(CallsOurs("fails"), "failed", "it was run")
        self.expect(CallsOursWithoutDevices("fails"), "skipped", "at least 2")

    def test_it_may_set_the_constants(self):
        self.expect(SetsConstants("backend_is_ours"), "error", r"KeyError: \('cpu:gloo', 'cpu'\)")

    def test_it_may_skip(self):
        self.expect(Exits("fails"), "skipped", "NCCL")

    def test_an_overriding_init_pg_is_called(self):
        self.addCleanup(OwnGroup.tearDownClass)
        self.expect(OwnGroup("passes"), "passed")
        self.expect(OwnGroup("fails"), "failed", "it was run")

    def test_init_pg_may_call_ours(self):
        self.addCleanup(CallsOurGroup.tearDownClass)
        self.expect(CallsOurGroup("fails"), "skipped", "at least 2")


class Mixed(FSDPTestMixin, MultiProcessTestCase):
    """Gets only the mixin's `_run`, which needs no accelerator."""

    world_size = 2
    destroy_pg_upon_exit = False

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @property
    def init_method(self):
        return f"file://{self.file_name}"

    def has_a_group(self):
        self.assertEqual([dist.get_world_size(), dist.get_rank()], [2, self.rank])
        dist.barrier()

    fails_in_one = OwnRun.fails_in_one
    skips = lambda self: self.skipTest("not today")  # noqa: E731


class MixedOnFakeGroup(Mixed):
    fake_pg = True

    def has_a_fake_group(self):
        self.assertEqual(dist.get_backend(), "fake")


class MixedOnDevices(Mixed):
    @classmethod
    def _run(cls, *args, **kwargs):
        common_fsdp.DEVICE_TYPE = "cuda"
        super()._run(*args, **kwargs)


class TestMixin(TestCase):
    def outcome(self, test):
        result = unittest.TestResult()
        test.run(result)
        kinds = ("errors", "failures", "skipped")
        return {kind: getattr(result, kind)[0][1] for kind in kinds if getattr(result, kind)}

    def test_runs_in_a_group_on_the_cpu(self):
        self.assertEqual(self.outcome(Mixed("has_a_group")), {})
        self.assertEqual(self.outcome(MixedOnFakeGroup("has_a_fake_group")), {})

    def test_other_outcomes(self):
        self.assertEqual(list(self.outcome(Mixed("fails_in_one"))), ["failures"])
        self.assertEqual(list(self.outcome(Mixed("skips"))), ["skipped"])

    def test_skips_where_devices_are_too_few(self):
        self.assertEqual(
            self.outcome(MixedOnDevices("has_a_group")), {"skipped": "Need at least 2 accelerator devices"}
        )


if __name__ == "__main__":
    run_tests()
