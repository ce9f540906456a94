"""The engine trains like DDP: the models, optimizers and kinds of step with which the recorded programs are tested."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equality_cases import BY_NAME
from spmd_training import train_both
from whole_parameter_cases import CASES, OTHERS

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

ALL = {**BY_NAME, **CASES, **OTHERS}


class TestEngineEquality(DTensorContinuousTestBase):
    """One case after the other, on persistent ranks."""

    world_size = 2

    @parametrize("style", ["replicate", "fully_shard"])
    @parametrize("name", [*ALL])
    def test_trains_like_ddp(self, name, style):
        train_both(self, ALL[name], compile(parallel_mode=DataParallel(style)))


instantiate_parametrized_tests(TestEngineEquality)

if __name__ == "__main__":
    run_tests()
