"""`compile`, under the name of torch.distributed._spmd.api."""

from torch_testing_ext._spmd.compiling import compile as compile
