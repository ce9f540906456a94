"""The data-parallel compiler under the name of `torch.distributed._spmd`, which PyTorch removed in 2.5."""

from torch_testing_ext._spmd.compiling import compile as compile
from torch_testing_ext._spmd.modes import (
    DataParallel as DataParallel,
    Override as Override,
    ParallelMode as ParallelMode,
    SPMDError as SPMDError,
)
