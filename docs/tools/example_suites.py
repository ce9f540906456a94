"""How the examples of each property suite are chosen and written: the table of choose_examples.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from example_source import of_placements, source_of
from example_traits import of_layout, of_shape, of_step, traits, transitions
from torch.distributed.tensor import Shard

Example = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Property:
    """A property of a suite, and how its examples are chosen and written."""

    test: str  # CLASS.METHOD
    name: str  # of the list in the module of data
    most: int
    world_sizes: tuple[int, ...] = (4,)  # with several, there is a list for each
    fewest: int = 8
    draws: int = 600
    traits_of: Callable[[Example], Iterable[str]] = traits
    write: Callable[[Example], str] = source_of
    keep: Callable[[Example], bool] = lambda example: True


@dataclasses.dataclass(frozen=True)
class Suite:
    """A file of properties, and the module of data beside it."""

    data: str
    header: str  # the imports and helpers of the module of data
    properties: tuple[Property, ...]


# -- collectives


def program_in_groups(example: Example) -> Iterator[str]:
    partition = example["partition"]
    yield from traits(partition)
    for size in {len(block) for block in partition.blocks}:
        program = example["programs"][size]
        yield from (f"{one} in a group of {size}" for step in program.steps for one in of_step(step) if one == step.op)
        yield from traits(program)


def of_call(example: Example) -> Iterator[str]:
    """Name what is special about a functional collective; fields that it ignores do not count."""
    call, op = example["call"], example["call"].op
    yield from traits({name: value for name, value in example.items() if name != "call"})
    yield op
    yield f"{op} in groups of {' and '.join(map(str, sorted(map(len, example['partition'].blocks))))}"
    if call.transposed:
        yield f"a transposed input of {op}"
    if op == "all_to_all":
        members = len(example["partition"].blocks[0])
        rows = [row[:members] for row in call.splits[:members]]
        yield f"{sum(map(sum, rows)) > 0} rows"
        if any(not any(row) for row in rows):
            yield "a rank that sends nothing"
        if any(not any(column) for column in zip(*rows, strict=True)):
            yield "a rank that receives nothing"
    elif 0 in call.shape:
        yield f"{op} without elements"
    elif call.shape != (1, 1):
        yield f"{op} of several elements"
    if op in ("all_reduce", "reduce_scatter"):
        yield f"{op} by {call.reduce}"
    if op in ("reduce_scatter", "all_gather"):
        yield f"{op} of dim {call.dim}"
    if op in ("broadcast", "permute"):
        yield f"{op} by {call.root}"


C10D = Suite(
    "c10d_examples",
    """\
import torch
from collective_programs import Program, Step

from torch_testing_ext.hypothesis_utils import PartitionPlan, PerRank
""",
    (
        Property("TestCollectives.test_programs_over_the_world", "OVER_THE_WORLD", 25),
        Property(
            "TestCollectives.test_programs_in_every_group_of_a_partition", "IN_GROUPS", 25, traits_of=program_in_groups
        ),
        Property("TestCollectives.test_objects_of_each_rank_reach_every_rank", "OBJECTS", 6, fewest=1),
    ),
)
FUNCTIONAL = Suite(
    "functional_collectives_examples",
    """\
from functional_calls import Call, GroupOptions

from torch_testing_ext.hypothesis_utils import PartitionPlan
""",
    (
        Property("TestFunctionalCollectives.test_results", "RESULTS", 30, (3,), traits_of=of_call),
        Property("TestFunctionalCollectives.test_coalesced", "COALESCED", 20, (3,), traits_of=of_call),
        Property("TestFunctionalCollectives.test_gradients", "GRADIENTS", 25, (3,), traits_of=of_call),
        Property("TestGroups.test_groups_with_options", "GROUPS", 16, (3,)),
    ),
)


# -- DTensors


def redistribution(example: Example) -> Iterator[str]:
    plan, full, target = example["case"]
    yield from traits(plan.mesh)
    yield from of_shape(tuple(full.shape))
    yield from transitions(tuple(full.shape), plan.mesh, plan.placements, target)
    yield from of_layout(tuple(full.shape), plan.mesh.shape, plan.placements, "at first")
    yield from of_layout(tuple(full.shape), plan.mesh.shape, target, "at last")


def write_redistribution(example: Example) -> str:
    plan, full, target = example["case"]
    return f"there_and_back({tuple(full.shape)}, {plan.mesh.shape}, {of_placements(plan)}, {source_of(target)})"


def reordering(example: Example) -> Iterator[str]:
    mesh, full, dim, order, others = example["case"]
    yield from traits(mesh)
    yield f"mesh dims in the order {tuple(order)}"
    yield from of_shape(tuple(full.shape))
    yield from of_layout(tuple(full.shape), mesh.shape, (Shard(dim),) * mesh.ndim)
    yield from of_layout(tuple(full.shape), mesh.shape, others, "at last")


def write_reordering(example: Example) -> str:
    mesh, full, dim, order, others = example["case"]
    return f"in_another_order({tuple(full.shape)}, {mesh.shape}, {dim}, {tuple(order)}, {source_of(tuple(others))})"


REDISTRIBUTE = Suite(
    "redistribute_examples",
    '''\
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, whole_numbers


def there_and_back(shape, mesh, source, target):
    full = whole_numbers(shape)
    return {"case": (DTensorPlan(full, MeshPlan(mesh), source), full, target)}


def in_another_order(shape, mesh, dim, order, others):
    """All dims of the mesh shard one dim of the tensor, in this order."""
    return {"case": (MeshPlan(mesh), whole_numbers(shape), dim, order, others)}
''',
    (
        Property(
            "TestRedistribute.test_on_1d_meshes",
            "ON_1D_MESHES",
            25,
            (4, 3),
            traits_of=redistribution,
            write=write_redistribution,
        ),
        Property(
            "TestRedistribute.test_on_2d_meshes",
            "ON_2D_MESHES",
            25,
            (4, 3),
            fewest=20,
            traits_of=redistribution,
            write=write_redistribution,
        ),
        Property(
            "TestRedistribute.test_strided_shards",
            "IN_ANOTHER_ORDER",
            16,
            (4, 3),
            fewest=12,
            traits_of=reordering,
            write=write_reordering,
        ),
    ),
)


def operation(example: Example) -> Iterator[str]:
    """Name an operation, what torch must do with it, and the layouts of its arguments."""
    from dtensor_ops_support import expected_result

    name = example.get("name") or matmul_of(example)
    plans, _ = example["case"]
    expected, _ = expected_result(name, layout_of(plans[0]))
    yield name
    yield f"{name} has {expected.value}".replace("either: it depends on torch's cost model", "an answer or a refusal")
    for plan, end in zip(plans, (" on the left", " on the right") if len(plans) > 1 else ("",), strict=True):
        yield from (one + end for one in traits(plan))


def matmul_of(example: Example) -> str:
    plans, _ = example["case"]
    dims = [plan.full.dim() for plan in plans]
    return "matmul of a batch and a matrix" if dims == [3, 2] else f"matmul of {dims[0]}-D and {dims[1]}-D"


def layout_of(plan: Any) -> Any:
    from dtensor_ops_support import ArgumentLayout

    return ArgumentLayout(tuple(plan.full.shape), plan.mesh.shape, plan.placements)


def is_right(example: Example) -> bool:
    from dtensor_ops_support import is_known_to_be_wrong

    return "name" not in example or not is_known_to_be_wrong(example["name"], layout_of(example["case"][0][0]))


def write_operation(example: Example) -> str:
    plans, _ = example["case"]
    name = [repr(example["name"])] if "name" in example else []
    each = [f"{tuple(plan.full.shape)}, {source_of(plan.placements)}" for plan in plans]
    return f"{'of_one' if len(plans) == 1 else 'of_two'}({', '.join([*name, str(plans[0].mesh.shape), *each])})"


def operations(test: str, name: str, most: int) -> Property:
    return Property(
        f"TestOps.{test}",
        name,
        most,
        draws=2000,
        traits_of=operation,
        keep=is_right,
        write=write_operation,
    )


OPS = Suite(
    "dtensor_ops_examples",
    """\
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, whole_numbers


def of_one(name, mesh, shape, placements):
    full = whole_numbers(shape)
    return {"name": name, "case": ((DTensorPlan(full, MeshPlan(mesh), placements),), (full,))}


def of_two(name, mesh, left_shape, left_placements, right_shape, right_placements):
    return {"name": name, **factors(mesh, left_shape, left_placements, right_shape, right_placements)}


def factors(mesh, left_shape, left_placements, right_shape, right_placements):
    left, right = whole_numbers(left_shape), whole_numbers(right_shape)
    plans = DTensorPlan(left, MeshPlan(mesh), left_placements), DTensorPlan(right, MeshPlan(mesh), right_placements)
    return {"case": (plans, (left, right))}
""",
    (
        operations("test_pointwise", "POINTWISE", 60),
        operations("test_reductions", "REDUCTIONS", 60),
        operations("test_views", "VIEWS", 45),
        operations("test_pointwise_of_two", "OF_TWO", 25),
        dataclasses.replace(
            operations("test_matmul", "MATMUL", 20),
            write=lambda example: write_operation(example).replace("of_two", "factors"),
        ),
    ),
)


# -- checkpoints


def of_case(case: Any) -> Iterator[str]:
    full, saved, mesh, chosen = case
    yield from of_shape(tuple(full.shape))
    yield str(full.dtype).removeprefix("torch.")
    yield f"from {' x '.join(map(str, saved.mesh.shape))} to {' x '.join(map(str, mesh.shape))}"
    yield from of_layout(tuple(full.shape), saved.mesh.shape, saved.placements, "at first")
    yield from of_layout(tuple(full.shape), mesh.shape, chosen, "at last")


def of_state(example: Example) -> Iterator[str]:
    yield f"{len(example['cases'])} tensors"
    yield from traits({"number": example["number"]})
    yield f"a text of {len(example['text'])}"
    yield from (one for case in example["cases"] for one in of_case(case) if "from" not in one)


def write_case(case: Any) -> str:
    full, saved, mesh, chosen = case
    dtype = str(full.dtype)
    target = of_placements(dataclasses.replace(saved, mesh=mesh, placements=chosen))
    shape = tuple(full.shape)
    return f"moved({shape}, {dtype}, {saved.mesh.shape}, {of_placements(saved)}, {mesh.shape}, {target})"


def write_state(example: Example) -> str:
    cases = ", ".join(map(write_case, example["cases"]))
    return f"{{'cases': [{cases}], 'number': {example['number']!r}, 'text': {example['text']!r}}}"


def moved(test: str, name: str) -> Property:
    return Property(
        f"TestCheckpoints.{test}",
        name,
        12,
        (4, 3),
        traits_of=lambda example: of_case(example["case"]),
        write=lambda example: f"{{'case': {write_case(example['case'])}}}",
    )


CHECKPOINT = Suite(
    "checkpoint_examples",
    '''\
import torch
from torch.distributed.tensor import Replicate, Shard

from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, in_order, whole_numbers


def moved(shape, dtype, mesh, placements, other_mesh, other_placements):
    """A tensor that is saved on a mesh and loaded on another."""
    full = whole_numbers(shape, dtype)
    return full, DTensorPlan(full, MeshPlan(mesh), placements), MeshPlan(other_mesh), other_placements
''',
    (
        moved("test_load_on_another_mesh", "ON_ANOTHER_MESH"),
        moved("test_load_as_a_plain_tensor_and_back", "AS_A_PLAIN_TENSOR"),
        Property(
            "TestCheckpoints.test_nested_states", "NESTED_STATES", 8, (4, 3), traits_of=of_state, write=write_state
        ),
    ),
)


# -- models

FULLY_SHARD = Suite(
    "fully_shard_examples",
    """\
import torch
from fully_shard_models import Layer

from torch_testing_ext.hypothesis_utils import MeshPlan
""",
    (
        Property("TestFullyShard.test_training", "TRAINING", 12, (4, 3), 10),
        Property("TestFullyShard.test_mixed_precision", "MIXED_PRECISION", 12, (4, 3), 10),
    ),
)
SCHEDULES = Suite(
    "schedule_examples",
    "from schedule_models import Part\n",
    (Property("TestSchedules.test_training", "TRAINING", 24, (2, 3), 14),),
)


def transformer(example: Example) -> Iterator[str]:
    yield from traits(example)
    yield f"{example['tokens'][0]} rows of {example['tokens'][1]} tokens"


def can_run(example: Example) -> bool:
    """Does the property accept it?"""
    from test_tp_properties import every_rank_has_a_row

    size = example["mesh"].shape[-1]
    rows = every_rank_has_a_row(example["args"].vocab_size, size)
    return rows and (example["tokens"][1] % size == 0 or not example["sequence_parallel"])


TENSOR_PARALLEL = Suite(
    "tp_property_examples",
    """\
from torch_testing_ext.distributed._tensor.common_dtensor import ModelArgs
from torch_testing_ext.hypothesis_utils import MeshPlan
""",
    (
        Property("TestTensorParallel.test_mlp", "MLP", 12, fewest=10),
        Property("TestTensorParallel.test_transformer", "TRANSFORMER", 6, traits_of=transformer, keep=can_run),
    ),
)


# -- training programs


def fragments(example: Example) -> Iterator[str]:
    """Name the fragments of a program by their sections."""
    recipe = example["recipe"]
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name == "layers":
            yield from (f"{init or 'no layer'}: {code}" for init, code in value)
        elif field.name == "changes":
            yield from (f"before a call: {code}" for _, code in value)
        elif field.name == "sizes":
            yield (
                "batches of other sizes in the ranks" if any(len(set(call)) > 1 for call in value) else "equal batches"
            )
            yield "batches of another size later" if len(set(value)) > 1 else "batches of one size"
        elif field.name == "odd":
            yield f"{len(value)} odd fragments"
        else:
            yield f"{field.name}: {value}"


def spmd(test: str, name: str, most: int, ranks: int) -> Property:
    return Property(test, name, most, (ranks,), most, 400, fragments)


SPMD = Suite(
    "spmd_examples",
    """\
# ruff: noqa: E501 (a fragment is easier to compare with others on one line)

from spmd_programs import Recipe
""",
    (
        spmd("TestProgramsOnTwoRanks.test_right_or_refused", "ON_TWO_RANKS", 6, 2),
        spmd("TestProgramsOnTwoRanks.test_mainstream_is_right", "OF_THE_MAINSTREAM", 4, 2),
        spmd("TestProgramsOnFourRanks.test_right_or_refused", "ON_FOUR_RANKS", 2, 4),
    ),
)

SUITES = {
    "test/distributed/properties/test_spmd_properties.py": SPMD,
    "test/distributed/properties/test_c10d_properties.py": C10D,
    "test/distributed/properties/test_functional_collectives_properties.py": FUNCTIONAL,
    "test/distributed/properties/test_redistribute_properties.py": REDISTRIBUTE,
    "test/distributed/properties/test_dtensor_ops_properties.py": OPS,
    "test/distributed/properties/test_tp_properties.py": TENSOR_PARALLEL,
    "test/distributed/properties/test_checkpoint_properties.py": CHECKPOINT,
    "test/distributed/properties/test_fully_shard_properties.py": FULLY_SHARD,
    "test/distributed/properties/test_schedule_properties.py": SCHEDULES,
}
