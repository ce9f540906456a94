"""Bases and helpers for tests of DTensor.

The names are those of torch.testing._internal.distributed._tensor.common_dtensor.

Importing this module imports no DTensor and touches no accelerator: it imports models, converter and local-tensor bases
at their first use, and determines device type and counts then, unless a test file sets them. A test file uses them at
import, so its ranks inherit them when they are forked.
"""

import importlib as _importlib
import typing as _typing

from torch_testing_ext._hypothesis import own_given as _own_given  # noqa: F401  # it is there from then on
from torch_testing_ext._machine import flags
from torch_testing_ext._machine.shared_names import share_names as _share
from torch_testing_ext._testing.bases.continuous import MultiProcContinuousTest as MultiProcContinuousTest
from torch_testing_ext._testing.bases.distributed_bases import run_subtests as run_subtests
from torch_testing_ext._testing.bases.multi_process import MultiProcessTestCase as MultiProcessTestCase
from torch_testing_ext._testing.bases.multi_threaded import MultiThreadedTestCase as MultiThreadedTestCase
from torch_testing_ext._testing.marks.backend_needs import ACCELERATOR_DIST_BACKENDS as ACCELERATOR_DIST_BACKENDS
from torch_testing_ext._testing.marks.distributed_needs import skip_if_lt_x_gpu as skip_if_lt_x_gpu
from torch_testing_ext._testing.marks.needs import TEST_SKIPS as TEST_SKIPS
from torch_testing_ext._testing.sharded import dtensor_devices as _dtensor_devices
from torch_testing_ext._testing.sharded.dtensor_bases import (
    DTensorContinuousTestBase as DTensorContinuousTestBase,
    DTensorOpTestBase as DTensorOpTestBase,
    DTensorTestBase as DTensorTestBase,
    DTensorTestMixin as DTensorTestMixin,
    TestFunc as TestFunc,
    skip_unless_torch_gpu as skip_unless_torch_gpu,
    with_comms as with_comms,
)

if _typing.TYPE_CHECKING:
    from torch_testing_ext._testing.bases.fake_groups import FakeStore as FakeStore
    from torch_testing_ext._testing.sharded.dtensor_converter import (
        DTensorConverter as DTensorConverter,
        check_all_placements as check_all_placements,
        check_dtensors as check_dtensors,
    )
    from torch_testing_ext._testing.sharded.experts import (
        SHARDED as SHARDED,
        ExpertLayer as ExpertLayer,
        ExpertParallel as ExpertParallel,
        ExpertParallelWithTP as ExpertParallelWithTP,
        Experts as Experts,
        TensorParallelForExpert as TensorParallelForExpert,
    )
    from torch_testing_ext._testing.sharded.layer_models import (
        MLPModule as MLPModule,
        MLPStacked as MLPStacked,
        RMSNormPython as RMSNormPython,
    )
    from torch_testing_ext._testing.sharded.local_tensor_bases import *
    from torch_testing_ext._testing.sharded.shard_orders import (
        ShardOrder as ShardOrder,
        generate_shard_orders as generate_shard_orders,
        make_full_tensor as make_full_tensor,
        patched_distribute_tensor as patched_distribute_tensor,
        redistribute as redistribute,
        shard_order_to_placement as shard_order_to_placement,
    )
    from torch_testing_ext._testing.sharded.sharding_rule_checks import (
        op_strategy_context as op_strategy_context,
        validate_sharding_rule_sample as validate_sharding_rule_sample,
        validate_sharding_rule_sample_backward as validate_sharding_rule_sample_backward,
    )
    from torch_testing_ext._testing.sharded.transformer import (
        Attention as Attention,
        FeedForward as FeedForward,
        ModelArgs as ModelArgs,
        Transformer as Transformer,
        TransformerBlock as TransformerBlock,
    )
    from torch_testing_ext._testing.sharded.wrapper_models import InOrder as InOrder

    DEVICE_COUNT: int
    DEVICE_TYPE: str
    NUM_DEVICES: int
    PG_BACKEND: str

# Names to import at their first use, by the module of `_testing/sharded/` that defines them.
_LAZY = {
    "dtensor_converter": ("DTensorConverter",),
    "shard_orders": (
        "generate_shard_orders",
        "make_full_tensor",
        "patched_distribute_tensor",
        "redistribute",
        "shard_order_to_placement",
    ),
    "sharding_rule_checks": (
        "op_strategy_context",
        "validate_sharding_rule_sample",
        "validate_sharding_rule_sample_backward",
    ),
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
    "layer_models": (
        "MLPModule",
        "MLPStacked",
        "RMSNormPython",
    ),
    "experts": (
        "ExpertLayer",
        "ExpertParallel",
        "ExpertParallelWithTP",
        "Experts",
        "TensorParallelForExpert",
    ),
    "transformer": (
        "Attention",
        "FeedForward",
        "ModelArgs",
        "Transformer",
        "TransformerBlock",
    ),
}
_MODULE_OF = {name: f"torch_testing_ext._testing.sharded.{module}" for module, names in _LAZY.items() for name in names}
_DEVICE_FACTS = ("DEVICE_COUNT", "DEVICE_TYPE", "NUM_DEVICES", "PG_BACKEND")
_share(__name__, _dtensor_devices.constants, *_DEVICE_FACTS)
_FLAGS = ("TEST_CUDA", "TEST_HPU", "TEST_PRIVATEUSE1", "TEST_WITH_ROCM", "TEST_XPU")

__all__ = [name for name in globals() if not name.startswith("_")] + list(_MODULE_OF) + list(_DEVICE_FACTS)


def __getattr__(name: str) -> _typing.Any:
    if name in _MODULE_OF:
        found = getattr(_importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = found
        return found
    if name in _FLAGS:
        return flags.flag(name)
    if name == "FakeStore":
        return _importlib.import_module("torch_testing_ext._testing.bases.fake_groups").FakeStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_DEVICE_FACTS})
