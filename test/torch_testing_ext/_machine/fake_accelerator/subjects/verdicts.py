"""Planted faults in the use of collectives, on devices: what is said is the same as on the CPU.

Run with --fake-accelerators 4.
"""

import dataclasses
from unittest import mock

import planted
import planted_sanitized
import torch
import torch.distributed as dist
from kit.planted_ranks import FaultCase, Fresh, body_for, outcome_with_tear_down

from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import sanitize

MISMATCHES = (
    *("dtype_of_all_reduce", "dtype_of_scatter", "count_before_a_barrier", "dtype_in_a_subgroup"),
    *("barrier_against_all_reduce", "fsdp_of_different_types", "dtensor_of_different_types"),
)
LEFT_ALONE = ("early_return", "early_skip", "exception_before_the_collective", "early_return_in_a_subgroup")
DEADLOCKS = ("opposite_order_of_two_groups", "key_that_nobody_sets")
SANITIZED = ("root_of_broadcast", "root_in_a_subgroup", "op_of_all_reduce", "nan_in_all_reduce")


class OnDevices(Fresh):
    pass


def on_device(fault, backend="fakeccl"):
    """The same fault, whose tensors are on the device of the rank."""

    def body(self):
        torch.accelerator.set_device_index(self.rank)
        with torch.device("fakeacc", self.rank):
            fault.body(self)

    return body_for("fresh", dataclasses.replace(fault, body=body), backend)


def stay_away(self):
    dist.barrier()
    if self.rank == 1:
        while True:
            sum(range(1000))
    dist.all_reduce(torch.ones(2))


for _name in (*MISMATCHES, *LEFT_ALONE, *DEADLOCKS):
    setattr(OnDevices, _name, on_device(planted.FAULTS[_name]))
for _name in SANITIZED:
    _fault = planted_sanitized.FAULTS[_name]
    setattr(OnDevices, _name, sanitize(*_fault.kinds)(on_device(_fault)))
OnDevices.of_a_mixed_group = on_device(planted.FAULTS["early_return"], "cpu:gloo,fakeacc:fakeccl")
OnDevices.stays_away = on_device(planted.Fault(stay_away, "error", (), ()))


class VerdictsTest(FaultCase):
    def check(self, faults, names):
        for name in names:
            with self.subTest(fault=name):
                self.assert_found(faults[name], OnDevices(name))

    def test_mismatches(self):
        self.check(planted.FAULTS, MISMATCHES)

    def test_ranks_that_leave(self):
        self.check(planted.FAULTS, LEFT_ALONE)

    def test_deadlocks(self):
        self.check(planted.FAULTS, DEADLOCKS)

    def test_what_only_the_sanitizer_finds(self):
        self.check(planted_sanitized.FAULTS, SANITIZED)

    def test_a_group_with_a_backend_for_each_kind_of_device(self):
        """Its barrier goes to the CPU, and is counted there: as with NCCL."""
        outcome, message = outcome_with_tear_down(OnDevices("of_a_mixed_group"))
        self.assertEqual(outcome, "error")
        self.assertIn("rank 1 left before all_reduce #1; ranks 0, 2 are waiting in it", message)

    def test_time_outs(self):
        with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", 2.0):
            outcome, message = outcome_with_tear_down(OnDevices("stays_away"))
        self.assertEqual(outcome, "error")
        self.assertIn("rank 1 never reached all_reduce #2; ranks 0, 2 are waiting in it; timed out after 2.", message)
