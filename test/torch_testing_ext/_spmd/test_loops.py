"""Ordinary training loops have the results of DDP in both styles, or are refused; none differs silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import LOOPS, ByCompiler, Parallel, whole

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

# The loops that a style refuses, with words of the error. All others have the results of DDP.
REFUSED: dict[tuple[str, str], str] = {
    ("validating", "fully_shard"): "got mixed torch.Tensor and DTensor",
    ("updating_views_of_weights", "fully_shard"): "share memory",
    ("reading_states", "fully_shard"): "mixed torch.Tensor and DTensor|each rank has a part",
}
# Those that both styles refuse on more than one rank.
REFUSED_ON_SEVERAL_RANKS = {
    "updating_in_the_backward": "The parameters of rank 1 differ",
    "projecting_what_a_rank_has": "The parameters of rank 1 differ",
}
# Fake accelerators have no sparse tensors.
NOT_ON_FAKE_ACCELERATORS = frozenset({"sparse", "sparse_with_momentum"})

on_loops = parametrize("name", [*LOOPS])
in_styles = parametrize("style", ["replicate", "fully_shard"])


def compare(test: Any, name: str, style: str) -> None:
    """Run a loop under DDP and by compiled steps, in float64: no optimizer then amplifies a rounding."""
    before, device = torch.get_default_dtype(), test.device_type
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device):
            torch.manual_seed(test.rank)
            expected = LOOPS[name](Parallel(test.rank, device))
            torch.manual_seed(test.rank)
            refusal = REFUSED.get((name, style)) or (test.world_size > 1 and REFUSED_ON_SEVERAL_RANKS.get(name))
            if refusal:
                with test.assertRaisesRegex((RuntimeError, ValueError), refusal):
                    LOOPS[name](ByCompiler(test.rank, style, device))
                return
            found = LOOPS[name](ByCompiler(test.rank, style, device))
    finally:
        torch.set_default_dtype(before)
    mine, theirs = ([_plain(leaf) for leaf in torch.utils._pytree.tree_leaves(each)] for each in (found, expected))
    test.assertEqual(len(mine), len(theirs))
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        test.assertEqual(one, other, rtol=1e-7, atol=1e-9, msg=f"{name}, rank {test.rank}: value {number}")


def _plain(leaf: Any) -> Any:
    return whole(leaf) if isinstance(leaf, torch.Tensor) else leaf


class TestLoops(DTensorContinuousTestBase):
    """All loops on two persistent ranks."""

    world_size = 2

    @in_styles
    @on_loops
    def test_equals_ddp(self, name, style):
        compare(self, name, style)


@pytest.mark.nightly
class TestLoopsOnOneRank(TestLoops):
    """One rank averages nothing."""

    world_size = 1


@pytest.mark.nightly
class TestLoopsOnThreeRanks(TestLoops):
    """The rows of most parameters are uneven, and the last rank has none of some."""

    world_size = 3


@pytest.mark.nightly
class TestLoopsOnFourRanks(TestLoops):
    """Several ranks have no rows of some parameters."""

    world_size = 4


instantiate_parametrized_tests(TestLoops)
instantiate_parametrized_tests(TestLoopsOnOneRank)
instantiate_parametrized_tests(TestLoopsOnThreeRanks)
instantiate_parametrized_tests(TestLoopsOnFourRanks)


@pytest.mark.nightly
class TestLoopsOnAccelerators(TestCase):
    """The loops on two fake accelerators."""

    def test_equals_ddp(self):
        left_out = " or ".join(f"name_{name}" for name in sorted(NOT_ON_FAKE_ACCELERATORS))
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--fake-accelerators=2", "-p", "no:cacheprovider",
             f"{__file__}::TestLoops", "-k", f"not ({left_out})"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )  # fmt: skip
        self.assertEqual(ran.returncode, 0, msg=ran.stdout + ran.stderr)
        count = 2 * (len(LOOPS) - len(NOT_ON_FAKE_ACCELERATORS))
        self.assertRegex(ran.stdout, rf"\b{count} passed")


if __name__ == "__main__":
    run_tests()
