"""A compiler from single-device train steps to data-parallel programs: `torch.distributed._spmd`, gone since 2.5."""

from torch_testing_ext._spmd.api import compile as compile
from torch_testing_ext._spmd.errors import SPMDError as SPMDError
from torch_testing_ext._spmd.parallel_mode import DataParallel as DataParallel, ParallelMode as ParallelMode
from torch_testing_ext._spmd.trace.override import Override as Override
