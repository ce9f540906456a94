"""Hypothesis for tests that run in several ranks: `given`, and strategies for meshes, DTensors and groups.

All ranks get the same example, or each gets its share of it (`per_rank`). If a rank fails, all ranks shrink the example
together, and the smallest one is reported once, with the outcome of each rank. See docs/guides/properties.md.
"""

from hypothesis import (
    HealthCheck as HealthCheck,
    Phase as Phase,
    Verbosity as Verbosity,
    assume as assume,
    example as example,
    reject as reject,
    reproduce_failure as reproduce_failure,
    seed as seed,
    settings as settings,
)
from hypothesis.strategies import data as data

from torch_testing_ext._hypothesis.blueprints import Blueprint as Blueprint, PerRank as PerRank
from torch_testing_ext._hypothesis.given_in_ranks import given as given, note as note, target as target
from torch_testing_ext._hypothesis.property_roles import PropertyFailure as PropertyFailure
from torch_testing_ext._hypothesis.replayed_examples import replay as replay
from torch_testing_ext._hypothesis.strategies.placement_strategies import (
    DTensorPlan as DTensorPlan,
    distribute as distribute,
    dtensors as dtensors,
    in_order as in_order,
    placements as placements,
)
from torch_testing_ext._hypothesis.strategies.tensor_strategies import (
    dtypes as dtypes,
    shapes as shapes,
    tensors as tensors,
    whole_numbers as whole_numbers,
)
from torch_testing_ext._hypothesis.strategies.world_strategies import (
    MeshPlan as MeshPlan,
    PartitionPlan as PartitionPlan,
    device_meshes as device_meshes,
    partitions as partitions,
    per_rank as per_rank,
    ranks as ranks,
    world_size as world_size,
)
