"""The compiled step trains like DDP: many models, optimizers and kinds of step, in both parallel styles.

The results match bit for bit, except for cases with a tolerance, in which the program rounds in a different order.
"""

from __future__ import annotations

import pytest
from equality_cases import BY_NAME, MODELS, OPTIMIZERS, STEPS
from spmd_training import (
    capture,
    train_both,
)

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


class TestEquality(DTensorContinuousTestBase):
    """Each case against DDP on two ranks."""

    @property
    def world_size(self):
        return 2

    def _compare(self, name, style):
        train_both(self, BY_NAME[name], capture(parallel_mode=DataParallel(style)))

    @pytest.mark.slow
    @STYLES
    @parametrize("name", [case.name for case in OPTIMIZERS])
    def test_optimizer(self, name, style):
        self._compare(name, style)

    @STYLES
    @parametrize("name", [case.name for case in STEPS])
    def test_step(self, name, style):
        self._compare(name, style)

    @STYLES
    @parametrize("name", [case.name for case in MODELS])
    def test_model(self, name, style):
        self._compare(name, style)


instantiate_parametrized_tests(TestEquality)

if __name__ == "__main__":
    run_tests()
