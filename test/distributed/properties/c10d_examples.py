"""The examples of test_c10d_properties.py, by value; choose_examples.py chose them."""

import torch
from collective_programs import Program, Step

from torch_testing_ext.hypothesis_utils import PartitionPlan, PerRank

OVER_THE_WORLD = [
    (
        "scatter without elements, scatter with root 1, reduce without elements",
        {
            "program": Program(
                (
                    Step("all_reduce", size=5, reduce="min", is_async=True),
                    Step(
                        "all_to_all_single",
                        is_async=True,
                        sizes=((1, 3, 2, 1), (0, 2, 1, 0), (3, 3, 1, 0), (0, 3, 1, 0)),
                    ),
                    Step("scatter", size=0, root=1, is_async=True),
                    Step("reduce", size=0, dtype=torch.float64, is_async=True),
                )
            )
        },
    ),
    (
        "all_gather_into_tensor without elements, reduce with root 2, reduce by max",
        {
            "program": Program(
                (
                    Step("send_recv", size=2, dtype=torch.int64),
                    Step("all_gather_into_tensor", size=0, dtype=torch.float64, is_async=True),
                    Step("reduce", size=7, root=2, reduce="max"),
                    Step("all_gather", size=3, is_async=True),
                )
            )
        },
    ),
    (
        "broadcast with root 2, asynchronous barrier, asynchronous broadcast",
        {
            "program": Program(
                (
                    Step("barrier", is_async=True),
                    Step("all_to_all", size=2),
                    Step("reduce_scatter", size=5, reduce="product", dtype=torch.int64),
                    Step("broadcast", size=2, root=2, dtype=torch.float64, is_async=True),
                )
            )
        },
    ),
    (
        "all_to_all without elements, asynchronous gather, all_reduce by sum",
        {
            "program": Program(
                (
                    Step("all_reduce", is_async=True),
                    Step("gather", size=7, root=3, is_async=True),
                    Step(
                        "all_to_all_single",
                        size=7,
                        dtype=torch.int64,
                        is_async=True,
                        sizes=((0, 1, 2, 1), (1, 0, 3, 3), (1, 2, 1, 0), (3, 2, 0, 3)),
                    ),
                    Step("all_to_all", size=0, is_async=True),
                )
            )
        },
    ),
    (
        "reduce_scatter by min, scatter with root 3, all_reduce by product",
        {
            "program": Program(
                (
                    Step("reduce_scatter", size=2, reduce="min", is_async=True),
                    Step("all_reduce", size=7, reduce="product"),
                    Step("gather", size=7, root=3),
                    Step("scatter", size=5, root=3, dtype=torch.float64, is_async=True),
                )
            )
        },
    ),
    (
        "gather with root 2, reduce by product, scatter with root 0",
        {
            "program": Program(
                (
                    Step("gather", root=2, is_async=True),
                    Step("reduce", size=5, root=2, reduce="product", dtype=torch.float64),
                    Step("scatter", size=0, is_async=True),
                    Step("all_gather_into_tensor", size=3, dtype=torch.int64),
                )
            )
        },
    ),
    (
        "gather without elements, reduce by min, all_reduce without elements",
        {
            "program": Program(
                (
                    Step("gather", size=0, dtype=torch.int64),
                    Step("all_reduce", size=0, reduce="min", dtype=torch.int64, is_async=True),
                    Step("all_to_all_single", size=3, dtype=torch.int64, is_async=True),
                    Step("reduce", size=7, reduce="min", dtype=torch.int64),
                )
            )
        },
    ),
    (
        "broadcast without elements, broadcast with root 3, broadcast with root 1",
        {
            "program": Program(
                (
                    Step("all_reduce", reduce="min"),
                    Step("all_reduce", size=2, reduce="product", is_async=True),
                    Step("broadcast", size=0, root=1),
                    Step("broadcast", size=2, root=3, dtype=torch.int64, is_async=True),
                )
            )
        },
    ),
    (
        "reduce with root 1, reduce_scatter by max, 2 steps",
        {
            "program": Program(
                (
                    Step("reduce_scatter", size=5, reduce="max", is_async=True),
                    Step("reduce", size=3, root=1, reduce="product"),
                )
            )
        },
    ),
    (
        "gather with root 1, reduce with root 3",
        {
            "program": Program(
                (
                    Step("reduce", size=0, root=3, is_async=True),
                    Step("gather", root=1, dtype=torch.int64, is_async=True),
                    Step("reduce", reduce="max", dtype=torch.float64),
                    Step("all_reduce", size=7, reduce="min", is_async=True),
                )
            )
        },
    ),
    (
        "broadcast with root 0, reduce_scatter by sum",
        {
            "program": Program(
                (
                    Step("broadcast", size=7, dtype=torch.float64, is_async=True),
                    Step("reduce_scatter", size=3, dtype=torch.float64, is_async=True),
                )
            )
        },
    ),
    (
        "all_gather without elements, send_recv without elements",
        {
            "program": Program(
                (
                    Step("all_gather", dtype=torch.int64),
                    Step("all_gather", size=0, dtype=torch.float64),
                    Step("send_recv", size=0, dtype=torch.int64),
                )
            )
        },
    ),
    (
        "scatter with root 2, 1 steps",
        {"program": Program((Step("scatter", size=7, root=2, dtype=torch.int64, is_async=True),))},
    ),
    (
        "reduce_scatter without elements",
        {
            "program": Program(
                (
                    Step("broadcast", root=2),
                    Step("gather", size=7, dtype=torch.int64),
                    Step("scatter", root=1, is_async=True),
                    Step("reduce_scatter", size=0, reduce="min", dtype=torch.float64),
                )
            )
        },
    ),
    (
        "all_reduce by max",
        {
            "program": Program(
                (
                    Step("all_gather_into_tensor", size=3, dtype=torch.float64, is_async=True),
                    Step("all_reduce", size=0, reduce="max", dtype=torch.int64),
                    Step("all_to_all", dtype=torch.int64),
                    Step("all_to_all", size=3, dtype=torch.int64, is_async=True),
                )
            )
        },
    ),
    (
        "all_to_all_single without elements",
        {
            "program": Program(
                (Step("all_reduce", size=0, reduce="product"), Step("all_to_all_single", size=0, is_async=True))
            )
        },
    ),
    (
        "a rank that receives nothing",
        {
            "program": Program(
                (
                    Step(
                        "all_to_all_single",
                        size=7,
                        dtype=torch.float64,
                        sizes=((0, 2, 2, 2), (0, 3, 1, 2), (0, 3, 1, 2), (0, 2, 2, 2)),
                    ),
                )
            )
        },
    ),
]
IN_GROUPS = [
    (
        "a rank that receives nothing, broadcast in a group of 2, broadcast with root 1",
        {
            "partition": PartitionPlan(((0, 1), (2,), (3,))),
            "programs": {
                1: Program(
                    (
                        Step("gather", size=3, is_async=True),
                        Step("all_gather_into_tensor", size=3, is_async=True),
                        Step("reduce", size=2, dtype=torch.int64),
                    )
                ),
                2: Program(
                    (
                        Step("broadcast", size=2, root=1, is_async=True),
                        Step("all_to_all_single", size=5, sizes=((0, 1), (0, 1))),
                        Step("all_reduce", size=5, reduce="product", dtype=torch.float64),
                    )
                ),
            },
        },
    ),
    (
        "all_to_all without elements, reduce_scatter by product, all_reduce by min",
        {
            "partition": PartitionPlan(((0, 1, 3), (2,))),
            "programs": {
                1: Program(
                    (
                        Step("broadcast", size=5),
                        Step("all_to_all", size=0),
                        Step("reduce_scatter", size=7, reduce="product"),
                    )
                ),
                3: Program(
                    (
                        Step("all_reduce", dtype=torch.float64, is_async=True),
                        Step("scatter", size=7, dtype=torch.int64),
                        Step("all_reduce", size=7, reduce="min"),
                    )
                ),
            },
        },
    ),
    (
        "gather without elements, reduce with root 1, reduce by product",
        {
            "partition": PartitionPlan(((0, 1), (2,), (3,))),
            "programs": {
                1: Program(
                    (
                        Step("reduce", reduce="max"),
                        Step("barrier", is_async=True),
                        Step("all_gather", size=5, is_async=True),
                    )
                ),
                2: Program(
                    (
                        Step("reduce", size=0, root=1, reduce="product", is_async=True),
                        Step("broadcast", size=2, is_async=True),
                        Step("gather", size=0, root=1, dtype=torch.int64, is_async=True),
                    )
                ),
            },
        },
    ),
    (
        "broadcast with root 2, broadcast in a group of 3, all_gather in a group of 3",
        {
            "partition": PartitionPlan(((0,), (1, 2, 3))),
            "programs": {
                1: Program((Step("reduce", size=7, reduce="product", is_async=True), Step("send_recv", size=5))),
                3: Program(
                    (
                        Step("broadcast", size=0, root=2),
                        Step("all_gather_into_tensor", size=7, dtype=torch.float64, is_async=True),
                        Step("all_gather", size=2, dtype=torch.int64, is_async=True),
                    )
                ),
            },
        },
    ),
    (
        "reduce by min, reduce_scatter by sum, all_gather_into_tensor in a group of 2",
        {
            "partition": PartitionPlan(((0,), (1, 2), (3,))),
            "programs": {
                1: Program(
                    (
                        Step("reduce_scatter"),
                        Step("reduce_scatter", size=5, reduce="min", is_async=True),
                        Step("scatter", size=2, is_async=True),
                    )
                ),
                2: Program(
                    (
                        Step("reduce", size=2, reduce="min", dtype=torch.float64, is_async=True),
                        Step("gather", size=0, dtype=torch.int64),
                        Step("all_gather_into_tensor", size=2, is_async=True),
                    )
                ),
            },
        },
    ),
    (
        "a rank that sends nothing, scatter in a group of 2, scatter with root 1",
        {
            "partition": PartitionPlan(((0, 2), (1,), (3,))),
            "programs": {
                1: Program(
                    (
                        Step("all_to_all", size=5, dtype=torch.int64, is_async=True),
                        Step("all_to_all_single", size=2, dtype=torch.float64, sizes=((0,),)),
                        Step("broadcast", dtype=torch.int64),
                    )
                ),
                2: Program((Step("scatter", size=7, root=1, dtype=torch.float64, is_async=True),)),
            },
        },
    ),
    (
        "reduce in a group of 3, gather in a group of 3, all_gather without elements",
        {
            "partition": PartitionPlan(((0, 2, 3), (1,))),
            "programs": {
                1: Program((Step("all_reduce", size=2, reduce="max", dtype=torch.float64), Step("barrier"))),
                3: Program(
                    (
                        Step("reduce", reduce="max", is_async=True),
                        Step("all_gather", size=0, dtype=torch.int64, is_async=True),
                        Step("gather", size=0),
                    )
                ),
            },
        },
    ),
    (
        "reduce_scatter in a group of 4, all_to_all in a group of 4, reduce_scatter without elements",
        {
            "partition": PartitionPlan(((0, 1, 2, 3),)),
            "programs": {
                4: Program(
                    (
                        Step("reduce_scatter", size=0, reduce="min", is_async=True),
                        Step("send_recv", size=0, dtype=torch.int64),
                        Step("all_to_all"),
                    )
                )
            },
        },
    ),
    (
        "reduce_scatter by max, all_gather in a group of 2, reduce_scatter in a group of 2",
        {
            "partition": PartitionPlan(((0, 1), (2, 3))),
            "programs": {
                2: Program(
                    (
                        Step("all_gather", size=2, is_async=True),
                        Step("send_recv", size=2),
                        Step("reduce_scatter", size=3, reduce="max", dtype=torch.float64, is_async=True),
                    )
                )
            },
        },
    ),
    (
        "barrier in a group of 3, asynchronous all_to_all_single",
        {
            "partition": PartitionPlan(((0, 1, 2), (3,))),
            "programs": {
                1: Program(
                    (
                        Step("all_gather_into_tensor", size=2, dtype=torch.float64, is_async=True),
                        Step("gather", size=7),
                        Step("all_to_all_single", is_async=True, sizes=((0,),)),
                    )
                ),
                3: Program(
                    (
                        Step("all_reduce", size=5, reduce="min", is_async=True),
                        Step("all_gather", size=5),
                        Step("barrier", is_async=True),
                    )
                ),
            },
        },
    ),
    (
        "broadcast in a group of 4, all_reduce in a group of 4, scatter in a group of 4",
        {
            "partition": PartitionPlan(((0, 1, 2, 3),)),
            "programs": {
                4: Program(
                    (
                        Step("all_reduce", size=0, dtype=torch.int64),
                        Step("scatter", size=5, root=1, dtype=torch.float64),
                        Step("broadcast", size=3, root=1, dtype=torch.int64),
                    )
                )
            },
        },
    ),
    (
        "scatter without elements, all_to_all in a group of 2, barrier in a group of 2",
        {
            "partition": PartitionPlan(((0,), (1, 2), (3,))),
            "programs": {
                1: Program((Step("scatter", size=7, dtype=torch.int64),)),
                2: Program(
                    (
                        Step("all_to_all", size=0, dtype=torch.float64, is_async=True),
                        Step("scatter", size=0),
                        Step("barrier", is_async=True),
                    )
                ),
            },
        },
    ),
    (
        "reduce_scatter in a group of 3, all_gather_into_tensor without elements",
        {
            "partition": PartitionPlan(((0, 1, 3), (2,))),
            "programs": {
                1: Program((Step("all_to_all_single"), Step("all_to_all", size=0, dtype=torch.float64))),
                3: Program(
                    (
                        Step("reduce_scatter", reduce="min", is_async=True),
                        Step("all_gather_into_tensor", size=0),
                        Step("gather", size=2, root=1, dtype=torch.int64, is_async=True),
                    )
                ),
            },
        },
    ),
    (
        "gather in a group of 4, reduce with root 2, reduce in a group of 4",
        {
            "partition": PartitionPlan(((0, 1, 2, 3),)),
            "programs": {
                4: Program(
                    (
                        Step("gather", size=0, is_async=True),
                        Step("reduce", size=7, root=2, reduce="product", dtype=torch.float64, is_async=True),
                    )
                )
            },
        },
    ),
    (
        "all_to_all_single in a group of 3, all_to_all in a group of 3",
        {
            "partition": PartitionPlan(((0, 1, 2), (3,))),
            "programs": {
                1: Program((Step("send_recv", size=5), Step("all_to_all_single", dtype=torch.int64))),
                3: Program(
                    (
                        Step("all_to_all_single", size=3, is_async=True, sizes=((3, 2, 2), (3, 1, 1), (3, 3, 0))),
                        Step("all_reduce", reduce="product", is_async=True),
                        Step("all_to_all", dtype=torch.float64),
                    )
                ),
            },
        },
    ),
    (
        "send_recv in a group of 3",
        {
            "partition": PartitionPlan(((0, 1, 2), (3,))),
            "programs": {
                1: Program(
                    (
                        Step("scatter", size=5, is_async=True),
                        Step("reduce_scatter", reduce="min"),
                        Step("reduce", size=3, reduce="max", is_async=True),
                    )
                ),
                3: Program(
                    (
                        Step("reduce_scatter", size=7, reduce="min", dtype=torch.float64, is_async=True),
                        Step("send_recv", size=0),
                    )
                ),
            },
        },
    ),
]
OBJECTS = [
    ("equal in all ranks, size 0", {"size": 0, "mine": PerRank((0, 0, 0, 0))}),
    ("size 5, different in ranks", {"size": 5, "mine": PerRank((2, 0, 0, 0))}),
    ("size 2", {"size": 2, "mine": PerRank((0, 0, 0, 0))}),
    ("size 1", {"size": 1, "mine": PerRank((0, 0, 0, 0))}),
]
