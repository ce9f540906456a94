"""A step sees whole parameters in both styles: it may ask for their sizes, write to them, and compute across rows.

Each case is compared with DDP on two ranks, the last ones on four.
"""

from __future__ import annotations

import pytest
from spmd_training import capture, train_both
from whole_parameter_cases import CASES, OTHERS

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


class TestWholeParameters(DTensorContinuousTestBase):
    """Steps that use parameters as whole tensors, against DDP on two ranks."""

    @property
    def world_size(self):
        return 2

    @parametrize("name", [*CASES, *OTHERS])
    def test_step_or_model(self, name):
        train_both(self, {**CASES, **OTHERS}[name], capture(parallel_mode=DataParallel("fully_shard")))


@pytest.mark.slow
class TestWholeParametersOnFourRanks(DTensorContinuousTestBase):
    """Steps that use parameters as whole tensors, on four ranks, some of which have no rows."""

    @property
    def world_size(self):
        return 4

    @parametrize("name", ["writing_before", "totals", "across_rows"])
    def test_step(self, name):
        case = CASES[name]
        case.tolerance = 1e-6
        train_both(self, case, capture(parallel_mode=DataParallel("fully_shard")))


instantiate_parametrized_tests(TestWholeParameters)
instantiate_parametrized_tests(TestWholeParametersOnFourRanks)

if __name__ == "__main__":
    run_tests()
