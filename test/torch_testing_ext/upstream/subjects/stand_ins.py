import sys

from torch_testing_ext.upstream import drop_in, originals

drop_in.install()
drop_in.install()
assert "torch" not in sys.modules
from unittest import mock

import torch
import torch.testing._internal.common_distributed
import torch.testing._internal.common_utils as common
from torch.testing import _internal
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase, get_timeout

from torch_testing_ext import common_distributed as ours

# Every form of import gives the same objects.
assert MultiProcessTestCase is ours.MultiProcessTestCase
assert torch.testing._internal.common_distributed is _internal.common_distributed is common_distributed
assert issubclass(MultiProcessTestCase, common.TestCase)
assert not originals.loaded, "our names must not load PyTorch's modules"

# A patch takes effect where the name is used, and is undone; also for a name that only PyTorch has.
name = "torch.testing._internal.common_distributed.TIMEOUT_DEFAULT"
before = get_timeout("x")
with mock.patch(name, 5):
    assert get_timeout("x") == 5, get_timeout("x")
assert get_timeout("x") == before
common_distributed.TIMEOUT_DEFAULT = 6
assert get_timeout("x") == 6
only_theirs = "torch.testing._internal.common_utils.random_square_matrix_of_rank"
with mock.patch(only_theirs, 5):
    assert originals.loaded["torch.testing._internal.common_utils"].random_square_matrix_of_rank == 5
    assert common.random_square_matrix_of_rank == 5
assert callable(common.random_square_matrix_of_rank)

# So is a patch of a name that our module imports on first use, whether PyTorch's module is loaded or not.
dtensor = "torch.testing._internal.distributed._tensor.common_dtensor"
for name in ("Attention", "MLPModule"):
    with mock.patch(f"{dtensor}.{name}", type("Patched", (), {})) as patched:
        assert getattr(sys.modules[dtensor], name) is patched
    assert getattr(sys.modules[dtensor], name).__module__.startswith("torch_testing_ext._testing.sharded.")
    originals.load_original(dtensor)

# A name that neither side has is missing, as in any module.
for missing in ("nowhere", "__nowhere__"):
    assert not hasattr(common, missing)
try:
    from torch.testing._internal.common_utils import nowhere  # noqa: F401
except ImportError:
    pass
else:
    raise AssertionError

# A star import gives the names that PyTorch exports, with our objects.
scope = {}
exec("from torch.testing._internal.common_distributed import *", scope)
assert scope["MultiProcessTestCase"] is MultiProcessTestCase
assert "RankError" not in scope and "os" in scope
exec("from torch.testing._internal.common_utils import *", scope)
assert scope["random_square_matrix_of_rank"].__module__ == "torch.testing._internal.common_utils"
assert torch.testing._internal.common_utils.__file__.endswith("common_utils.py")
