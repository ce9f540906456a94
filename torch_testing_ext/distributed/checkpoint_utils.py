"""Decorators for tests of checkpoints, under the names of torch.testing._internal.distributed.checkpoint_utils."""

from torch_testing_ext._utils.checkpoints import (
    with_checkpoint_logging as with_checkpoint_logging,
    with_temp_dir as with_temp_dir,
)
