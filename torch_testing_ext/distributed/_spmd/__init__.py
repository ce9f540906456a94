"""A compiler from single-device train steps to data-parallel programs: `torch.distributed._spmd`, gone since 2.5."""

from .api import compile
from .errors import SPMDError
from .override import Override
from .parallel_mode import DataParallel, ParallelMode

__all__ = ["DataParallel", "Override", "ParallelMode", "SPMDError", "compile"]
