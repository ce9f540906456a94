import sys

if "before" in sys.argv:
    import torch.testing._internal.distributed._shard.sharded_tensor._test_ops_common as ops_before
from torch_testing_ext.upstream import drop_in, originals

drop_in.install()
from unittest import mock

package = "torch.testing._internal.distributed._shard.sharded_tensor"
import torch.testing._internal.distributed._shard.sharded_tensor as stand_in
import torch.testing._internal.distributed._shard.sharded_tensor._test_st_common as common
from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase
from torch.testing._internal.distributed._shard.sharded_tensor._test_ops_common import gen_binary_op_func

from torch_testing_ext.distributed._shard.sharded_tensor import ShardedTensorTestBase as ours

assert isinstance(stand_in, drop_in.StandIn) and ShardedTensorTestBase is ours
assert stand_in._test_st_common is common is sys.modules[f"{package}._test_st_common"]
assert package not in originals.loaded or "before" in sys.argv
with mock.patch(f"{package}._test_st_common.PLACEMENTS", 5):
    assert common.PLACEMENTS == 5
assert common.PLACEMENTS != 5 and callable(gen_binary_op_func)
if "before" in sys.argv:
    assert stand_in._test_ops_common is ops_before
try:
    import torch.testing._internal.distributed._shard.sharded_tensor.nowhere  # noqa: F401
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
