"""Models for tests of composable wrappers, under the names of torch.testing._internal.common_dist_composable."""

from torch_testing_ext._testing.sharded.wrapper_models import (
    CompositeModel as CompositeModel,
    CompositeParamModel as CompositeParamModel,
    FakeSequential as FakeSequential,
    NestedSequentialModel as NestedSequentialModel,
    UnitModule as UnitModule,
    UnitParamModule as UnitParamModule,
)
