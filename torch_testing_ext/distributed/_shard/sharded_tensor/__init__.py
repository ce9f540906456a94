"""Tests of sharded tensors, under the names of torch.testing._internal.distributed._shard.sharded_tensor."""

from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase as MultiProcessTestCase
from torch_testing_ext._testing.bases.sharded_tensor_base import (
    TEST_GPU_NUM as TEST_GPU_NUM,
    ShardedTensorTestBase as ShardedTensorTestBase,
    with_comms as with_comms,
)
from torch_testing_ext._testing.marks.collective_platforms import tp_transports as tp_transports
from torch_testing_ext._testing.marks.needs import TEST_SKIPS as TEST_SKIPS
