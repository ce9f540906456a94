"""Bases and helpers for tests of DTensor.

The names are those of torch.testing._internal.distributed._tensor.common_dtensor.

Importing this module imports no DTensor and touches no accelerator: it imports models, converter and local-tensor bases
at their first use, and determines device type and counts then, unless a test file sets them. A test file uses them at
import, so its ranks inherit them when they are forked.
"""

import importlib as _importlib
import typing as _typing

from torch_testing_ext._cases.continuous import MultiProcContinuousTest as MultiProcContinuousTest
from torch_testing_ext._cases.distributed_base import run_subtests as run_subtests
from torch_testing_ext._cases.multi_process import MultiProcessTestCase as MultiProcessTestCase
from torch_testing_ext._cases.multi_threaded import MultiThreadedTestCase as MultiThreadedTestCase
from torch_testing_ext._dtensor import devices_used as _devices_used
from torch_testing_ext._dtensor.dtensor_bases import (
    DTensorContinuousTestBase as DTensorContinuousTestBase,
    DTensorOpTestBase as DTensorOpTestBase,
    DTensorTestBase as DTensorTestBase,
    DTensorTestMixin as DTensorTestMixin,
    TestFunc as TestFunc,
    skip_unless_torch_gpu as skip_unless_torch_gpu,
    with_comms as with_comms,
)
from torch_testing_ext._machine import flags as _flags
from torch_testing_ext._machine.lazy import share as _share
from torch_testing_ext._marks.distributed import (
    ACCELERATOR_DIST_BACKENDS as ACCELERATOR_DIST_BACKENDS,
    skip_if_lt_x_gpu as skip_if_lt_x_gpu,
)
from torch_testing_ext._marks.needs import TEST_SKIPS as TEST_SKIPS

if _typing.TYPE_CHECKING:
    from torch_testing_ext._dtensor.converter import *
    from torch_testing_ext._dtensor.experts import *
    from torch_testing_ext._dtensor.local_tensor_bases import *
    from torch_testing_ext._dtensor.mlp import *
    from torch_testing_ext._dtensor.ordered_shards import *
    from torch_testing_ext._dtensor.sharding_rules import *
    from torch_testing_ext._dtensor.transformer import *
    from torch_testing_ext._utils.mock_group import FakeStore as FakeStore

    DEVICE_COUNT: int
    DEVICE_TYPE: str
    NUM_DEVICES: int
    PG_BACKEND: str

# Names to import at their first use, by the module of `_dtensor/` that defines them.
_LAZY = {
    "converter": ("DTensorConverter",),
    "experts": ("ExpertLayer", "ExpertParallel", "ExpertParallelWithTP", "Experts", "TensorParallelForExpert"),
    "local_tensor_bases": (
        "LocalDTensorContinuousTestBase",
        "LocalDTensorOpTestBase",
        "LocalDTensorTestBase",
        "create_local_tensor_test_class",
        "make_wrapped",
        "map_local_for_rank",
        "map_local_tensor_for_rank",
        "reduce_local_int",
    ),
    "mlp": ("MLPModule", "MLPStacked", "RMSNormPython"),
    "ordered_shards": (
        "generate_shard_orders",
        "make_full_tensor",
        "patched_distribute_tensor",
        "redistribute",
        "shard_order_to_placement",
    ),
    "sharding_rules": (
        "op_strategy_context",
        "validate_sharding_rule_sample",
        "validate_sharding_rule_sample_backward",
    ),
    "transformer": ("Attention", "FeedForward", "ModelArgs", "Transformer", "TransformerBlock"),
}
_MODULE_OF = {name: f"torch_testing_ext._dtensor.{module}" for module, names in _LAZY.items() for name in names}
_DEVICE_FACTS = ("DEVICE_COUNT", "DEVICE_TYPE", "NUM_DEVICES", "PG_BACKEND")
_share(__name__, _devices_used.constants, *_DEVICE_FACTS)
_FLAGS = ("TEST_CUDA", "TEST_HPU", "TEST_PRIVATEUSE1", "TEST_WITH_ROCM", "TEST_XPU")

__all__ = [name for name in globals() if not name.startswith("_")] + list(_MODULE_OF) + list(_DEVICE_FACTS)


def __getattr__(name: str) -> _typing.Any:
    if name in _MODULE_OF:
        found = getattr(_importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = found
        return found
    if name in _FLAGS:
        return _flags.flag(name)
    if name == "FakeStore":
        return _importlib.import_module("torch_testing_ext._utils.mock_group").FakeStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_DEVICE_FACTS})
