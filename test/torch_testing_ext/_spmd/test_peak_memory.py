"""The memory of a rank, between calls and at the peak of a call, beside DDP's, as benchmarks/spmd.py measures it."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import pytest
import spmd

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow


@unittest.skipUnless(sys.platform == "linux", "glibc tells what is allocated")
class TestMemory(TestCase):
    """A transformer with Adam on two ranks."""

    def test_beside_ddp(self):
        ddp, sharded = spmd.memory_of(spmd.TRANSFORMER, spmd.DDP), spmd.memory_of(spmd.TRANSFORMER, spmd.FULLY_SHARD)
        # Between calls: half of the parameters, gradients and states, and what is small.
        self.assertLess(sharded[0], 0.55 * ddp[0])
        self.assertLess(sharded[1], spmd.PEAK_TARGET[-1] * ddp[1])

    def test_replicate_takes_what_ddp_takes(self):
        ddp, replicated = spmd.memory_of(spmd.DEEP, spmd.DDP), spmd.memory_of(spmd.DEEP, spmd.REPLICATE)
        self.assertLess(replicated[1], 1.05 * ddp[1])


if __name__ == "__main__":
    run_tests()
