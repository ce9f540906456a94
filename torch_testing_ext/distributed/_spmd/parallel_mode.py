"""The parallel modes, under the names of torch.distributed._spmd.parallel_mode."""

from torch_testing_ext._spmd.modes import DataParallel as DataParallel, ParallelMode as ParallelMode
