"""The examples of test_functional_collectives_properties.py, by value; choose_examples.py chose them."""

from functional_calls import Call, GroupOptions

from torch_testing_ext.hypothesis_utils import PartitionPlan

RESULTS = [
    (
        "reduce_scatter of dim 1, reduce_scatter of several elements, a transposed input of reduce_scatter",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("reduce_scatter", (3, 3), dim=1, transposed=True),
            "way": "name",
        },
    ),
    (
        "False rows, all_to_all in groups of 1 and 1 and 1, a rank that sends nothing",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("all_to_all", (0, 0), splits=((0, 1, 2), (2, 2, 1), (1, 2, 2)), transposed=True),
            "way": "ranks",
        },
    ),
    (
        "permute in groups of 3, permute by 1, a transposed input of permute",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("permute", (3, 3), root=1, transposed=True),
            "way": "mesh",
        },
    ),
    (
        "all_reduce by max, all_reduce in groups of 3, a transposed input of all_reduce",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("all_reduce", (0, 0), reduce="max", transposed=True),
            "way": "group",
        },
    ),
    (
        "a transposed input of all_gather, all_gather of several elements, all_gather of dim 1",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("all_gather", (3, 3), dim=1, transposed=True),
            "way": "name",
        },
    ),
    (
        "a transposed input of broadcast, broadcast by 1, broadcast of several elements",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("broadcast", (2, 2), root=1, transposed=True),
            "way": "name",
        },
    ),
    (
        "reduce_scatter by max, reduce_scatter in groups of 3, reduce_scatter without elements",
        {"partition": PartitionPlan(((0, 1, 2),)), "call": Call("reduce_scatter", (2, 0), reduce="max"), "way": "mesh"},
    ),
    (
        "permute without elements, permute by 0, permute in groups of 1 and 2",
        {"partition": PartitionPlan(((0, 1), (2,))), "call": Call("permute", (2, 0), transposed=True), "way": "group"},
    ),
    (
        "all_reduce of several elements, all_reduce by sum, all_reduce in groups of 1 and 2",
        {"partition": PartitionPlan(((0, 2), (1,))), "call": Call("all_reduce", (1, 2)), "way": "mesh"},
    ),
    (
        "broadcast in groups of 3, broadcast by 2, broadcast without elements",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("broadcast", (1, 0), root=2, transposed=True),
            "way": "mesh",
        },
    ),
    (
        "all_gather of dim -1, all_gather in groups of 3, all_gather without elements",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("all_gather", (1, 0), dim=-1, transposed=True),
            "way": "name",
        },
    ),
    (
        "reduce_scatter in groups of 1 and 1 and 1, reduce_scatter of dim -1",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("reduce_scatter", (1, 0), dim=-1, transposed=True),
            "way": "group",
        },
    ),
    (
        "all_to_all in groups of 1 and 2, True rows",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("all_to_all", (1, 0), splits=((0, 2, 1), (0, 0, 2), (0, 0, 2))),
            "way": "ranks",
        },
    ),
    (
        "permute in groups of 1 and 1 and 1, permute by 2",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("permute", (0, 1), root=2, transposed=True),
            "way": "group",
        },
    ),
    (
        "all_gather in groups of 1 and 1 and 1, all_gather of dim 0",
        {"partition": PartitionPlan(((0,), (1,), (2,))), "call": Call("all_gather", (2, 2)), "way": "mesh"},
    ),
    (
        "broadcast in groups of 1 and 1 and 1, broadcast by 0",
        {"partition": PartitionPlan(((0,), (1,), (2,))), "call": Call("broadcast", (2, 0)), "way": "group"},
    ),
    (
        "all_reduce in groups of 1 and 1 and 1, all_reduce by min",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("all_reduce", (2, 1), reduce="min"),
            "way": "group",
        },
    ),
    (
        "reduce_scatter by min",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("reduce_scatter", (3, 3), dim=-1, reduce="min", transposed=True),
            "way": "name",
        },
    ),
    (
        "all_to_all in groups of 3",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("all_to_all", (0, 0), splits=((2, 1, 1), (2, 1, 1), (0, 0, 2)), transposed=True),
            "way": "name",
        },
    ),
    (
        "all_reduce by product",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("all_reduce", (3, 0), reduce="product"),
            "way": "name",
        },
    ),
    (
        "reduce_scatter by product",
        {
            "partition": PartitionPlan(((0, 1), (2,))),
            "call": Call("reduce_scatter", (3, 3), reduce="product"),
            "way": "group",
        },
    ),
]
COALESCED = [
    (
        "reduce_scatter without elements, reduce_scatter by min, a transposed input of reduce_scatter",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("reduce_scatter", (3, 0), reduce="min", transposed=True),
            "count": 3,
        },
    ),
    (
        "all_gather in groups of 3, all_gather without elements, a transposed input of all_gather",
        {"partition": PartitionPlan(((0, 1, 2),)), "call": Call("all_gather", (0, 1), transposed=True), "count": 1},
    ),
    (
        "all_reduce in groups of 1 and 1 and 1, all_reduce by max, groups of 1 and 1 and 1",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("all_reduce", (2, 2), reduce="max", transposed=True),
            "count": 2,
        },
    ),
    (
        "all_reduce without elements, all_reduce by min, all_reduce in groups of 1 and 2",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("all_reduce", (0, 0), reduce="min", transposed=True),
            "count": 1,
        },
    ),
    (
        "reduce_scatter in groups of 1 and 1 and 1, reduce_scatter by product, reduce_scatter of several elements",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("reduce_scatter", (1, 3), reduce="product", transposed=True),
            "count": 1,
        },
    ),
    (
        "all_gather of several elements, all_gather in groups of 1 and 2",
        {"partition": PartitionPlan(((0, 2), (1,))), "call": Call("all_gather", (3, 3), transposed=True), "count": 2},
    ),
    (
        "all_reduce by sum, all_reduce in groups of 3",
        {"partition": PartitionPlan(((0, 1, 2),)), "call": Call("all_reduce", (0, 2), transposed=True), "count": 3},
    ),
    (
        "reduce_scatter by max, reduce_scatter in groups of 3",
        {"partition": PartitionPlan(((0, 1, 2),)), "call": Call("reduce_scatter", (3, 3), reduce="max"), "count": 2},
    ),
    (
        "all_gather in groups of 1 and 1 and 1",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("all_gather", (2, 0), transposed=True),
            "count": 3,
        },
    ),
    (
        "reduce_scatter by sum",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("reduce_scatter", (2, 2), transposed=True),
            "count": 1,
        },
    ),
    (
        "all_reduce by product",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("all_reduce", (3, 1), reduce="product", transposed=True),
            "count": 1,
        },
    ),
]
GRADIENTS = [
    (
        "False rows, a transposed input of all_to_all, a rank that sends nothing",
        {
            "partition": PartitionPlan(((0, 2), (1,))),
            "call": Call("all_to_all", (1, 1), splits=((0, 0, 2), (0, 0, 1), (0, 0, 1)), transposed=True),
        },
    ),
    (
        "reduce_scatter in groups of 3, reduce_scatter of dim 0, a transposed input of reduce_scatter",
        {"partition": PartitionPlan(((0, 1, 2),)), "call": Call("reduce_scatter", (2, 2), transposed=True)},
    ),
    (
        "all_reduce in groups of 1 and 1 and 1, all_reduce without elements, a transposed input of all_reduce",
        {"partition": PartitionPlan(((0,), (1,), (2,))), "call": Call("all_reduce", (1, 0), transposed=True)},
    ),
    (
        "all_gather without elements, all_gather of dim 0, a transposed input of all_gather",
        {"partition": PartitionPlan(((0, 2), (1,))), "call": Call("all_gather", (0, 1), transposed=True)},
    ),
    (
        "reduce_scatter of dim -1, reduce_scatter without elements, reduce_scatter in groups of 1 and 2",
        {"partition": PartitionPlan(((0, 2), (1,))), "call": Call("reduce_scatter", (0, 3), dim=-1, transposed=True)},
    ),
    (
        "all_gather of dim 1, all_gather in groups of 3, all_gather of several elements",
        {"partition": PartitionPlan(((0, 1, 2),)), "call": Call("all_gather", (3, 1), dim=1, transposed=True)},
    ),
    (
        "all_reduce of several elements, all_reduce in groups of 1 and 2",
        {"partition": PartitionPlan(((0, 2), (1,))), "call": Call("all_reduce", (2, 2), transposed=True)},
    ),
    (
        "all_to_all in groups of 3, True rows",
        {
            "partition": PartitionPlan(((0, 1, 2),)),
            "call": Call("all_to_all", (1, 1), splits=((0, 0, 0), (0, 0, 1), (0, 0, 1)), transposed=True),
        },
    ),
    (
        "all_gather in groups of 1 and 1 and 1, all_gather of dim -1",
        {"partition": PartitionPlan(((0,), (1,), (2,))), "call": Call("all_gather", (2, 0), dim=-1, transposed=True)},
    ),
    (
        "reduce_scatter in groups of 1 and 1 and 1, reduce_scatter of dim 1",
        {"partition": PartitionPlan(((0,), (1,), (2,))), "call": Call("reduce_scatter", (2, 0), dim=1)},
    ),
    (
        "all_to_all in groups of 1 and 1 and 1",
        {
            "partition": PartitionPlan(((0,), (1,), (2,))),
            "call": Call("all_to_all", (2, 0), splits=((0, 2, 2), (0, 1, 2), (0, 2, 0)), transposed=True),
        },
    ),
    (
        "all_reduce in groups of 3",
        {"partition": PartitionPlan(((0, 1, 2),)), "call": Call("all_reduce", (2, 2), transposed=True)},
    ),
]
GROUPS = [
    (
        "ranks (2, 0), ranks (1,), ranks (0,)",
        {
            "plans": [GroupOptions((2, 0)), GroupOptions((1,), description="a group", sort=True), GroupOptions((0,))],
            "root": 0,
        },
    ),
    (
        "ranks (1, 0), ranks (0, 2, 1), ranks (2,)",
        {
            "plans": [
                GroupOptions((0, 2, 1), description="a group"),
                GroupOptions((2,)),
                GroupOptions((1, 0), sort=True),
            ],
            "root": 1,
        },
    ),
    (
        "ranks (2, 1, 0), ranks (2, 0, 1), ranks (1, 0, 2)",
        {
            "plans": [
                GroupOptions((2, 0, 1), description="a group", sort=True),
                GroupOptions((2, 1, 0)),
                GroupOptions((1, 0, 2)),
            ],
            "root": 2,
        },
    ),
    (
        "ranks (1, 2), ranks (0, 1, 2), ranks (1, 2, 0)",
        {
            "plans": [
                GroupOptions((0, 1, 2), description="a group"),
                GroupOptions((1, 2)),
                GroupOptions((1, 2, 0), sort=True),
            ],
            "root": 1,
        },
    ),
    (
        "ranks (0, 2), ranks (0, 1), 2 plans",
        {"plans": [GroupOptions((0, 1), description="a group", sort=True), GroupOptions((0, 2))], "root": 2},
    ),
    ("ranks (2, 1), 1 plans", {"plans": [GroupOptions((2, 1))], "root": 2}),
    (
        "ranks (1, 2, 0) with ranks (2, 1)",
        {
            "plans": [
                GroupOptions((0, 2, 1)),
                GroupOptions((2, 1)),
                GroupOptions((1, 2, 0), description="a group", sort=True),
            ],
            "root": 0,
        },
    ),
    (
        "ranks (0, 2) with ranks (1, 0, 2)",
        {
            "plans": [GroupOptions((0, 2), description="a group"), GroupOptions((1, 0, 2)), GroupOptions((1,))],
            "root": 1,
        },
    ),
]
