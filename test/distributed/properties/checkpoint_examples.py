"""The examples of test_checkpoint_properties.py, by value; choose_examples.py chose them."""

import torch
from torch.distributed.tensor import Replicate, Shard

from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, in_order, whole_numbers


def moved(shape, dtype, mesh, placements, other_mesh, other_placements):
    """A tensor that is saved on a mesh and loaded on another."""
    full = whole_numbers(shape, dtype)
    return full, DTensorPlan(full, MeshPlan(mesh), placements), MeshPlan(other_mesh), other_placements


ON_ANOTHER_MESH = {
    4: [
        (
            "a strided shard at last, a strided shard at first, from 2 x 2 to 1 x 4",
            {
                "case": moved(
                    (1,),
                    torch.bfloat16,
                    (2, 2),
                    in_order((Shard(0), Shard(0)), (1, 0), (2, 2)),
                    (1, 4),
                    in_order((Shard(0), Shard(0)), (1, 0), (1, 4)),
                )
            },
        ),
        (
            "from 1 x 4 to 2 x 2, uneven shards at first, uneven shards at last",
            {
                "case": moved(
                    (13, 13),
                    torch.float32,
                    (1, 4),
                    in_order((Shard(1), Shard(1)), (1, 0), (1, 4)),
                    (2, 2),
                    (Shard(1), Replicate()),
                )
            },
        ),
        (
            "sharded dim 2 at first, sharded dim 2 at last, from 2 x 2 to 4",
            {"case": moved((4, 1, 1), torch.float32, (2, 2), (Replicate(), Shard(2)), (4,), (Shard(2),))},
        ),
        ("from 4 to 4, int64, 0-D", {"case": moved((), torch.int64, (4,), (Replicate(),), (4,), (Replicate(),))}),
        (
            "without elements, from 1 x 4 to 1 x 4",
            {"case": moved((2, 1, 0), torch.int64, (1, 4), (Shard(1), Shard(2)), (1, 4), (Replicate(), Shard(0)))},
        ),
        (
            "from 4 x 1 to 1 x 4",
            {"case": moved((5, 1), torch.bfloat16, (4, 1), (Shard(1), Replicate()), (1, 4), (Shard(0), Shard(1)))},
        ),
        (
            "from 4 x 1 to 2 x 2",
            {"case": moved((3, 6, 11), torch.bfloat16, (4, 1), (Shard(0), Shard(2)), (2, 2), (Replicate(), Shard(0)))},
        ),
        (
            "from 2 x 2 to 2 x 2",
            {"case": moved((5,), torch.float32, (2, 2), (Replicate(), Shard(0)), (2, 2), (Shard(0), Shard(0)))},
        ),
        (
            "from 4 to 1 x 4",
            {
                "case": moved(
                    (8, 3), torch.int64, (4,), (Shard(1),), (1, 4), in_order((Shard(1), Shard(1)), (1, 0), (1, 4))
                )
            },
        ),
        (
            "from 4 x 1 to 4 x 1",
            {"case": moved((11, 13), torch.int64, (4, 1), (Shard(1), Shard(0)), (4, 1), (Shard(1), Shard(0)))},
        ),
        (
            "from 1 x 4 to 4 x 1",
            {
                "case": moved(
                    (2, 1),
                    torch.bfloat16,
                    (1, 4),
                    in_order((Shard(1), Shard(1)), (1, 0), (1, 4)),
                    (4, 1),
                    (Shard(1), Replicate()),
                )
            },
        ),
        (
            "from 4 x 1 to 4",
            {"case": moved((3, 5, 13), torch.float32, (4, 1), (Shard(1), Shard(1)), (4,), (Shard(2),))},
        ),
    ],
    3: [
        (
            "a strided shard at first, a dim that 2 mesh dims shard at first, from 1 x 3 to 3 x 1",
            {
                "case": moved(
                    (1, 13, 6),
                    torch.bfloat16,
                    (1, 3),
                    in_order((Shard(0), Shard(0)), (1, 0), (1, 3)),
                    (3, 1),
                    (Shard(1), Shard(0)),
                )
            },
        ),
        (
            "a strided shard at last, a dim that 2 mesh dims shard at last, sharded dim 2 at last",
            {
                "case": moved(
                    (11, 2, 4),
                    torch.float32,
                    (1, 3),
                    (Shard(1), Replicate()),
                    (1, 3),
                    in_order((Shard(2), Shard(2)), (1, 0), (1, 3)),
                )
            },
        ),
        (
            "from 3 x 1 to 1 x 3, uneven shards at first, 1-D",
            {"case": moved((13,), torch.int64, (3, 1), (Shard(0), Replicate()), (1, 3), (Replicate(), Shard(0)))},
        ),
        (
            "without elements, 2-D, from 3 to 3",
            {"case": moved((0, 0), torch.float32, (3,), (Replicate(),), (3,), (Replicate(),))},
        ),
        (
            "sharded dim 2 at first, from 3 to 3 x 1",
            {"case": moved((1, 13, 8), torch.float32, (3,), (Shard(2),), (3, 1), (Shard(0), Replicate()))},
        ),
        (
            "from 3 x 1 to 3, 0-D",
            {"case": moved((), torch.bfloat16, (3, 1), (Replicate(), Replicate()), (3,), (Replicate(),))},
        ),
    ],
}
AS_A_PLAIN_TENSOR = {
    4: [
        (
            "a strided shard at last, a strided shard at first, from 2 x 2 to 1 x 4",
            {
                "case": moved(
                    (1,),
                    torch.bfloat16,
                    (2, 2),
                    in_order((Shard(0), Shard(0)), (1, 0), (2, 2)),
                    (1, 4),
                    in_order((Shard(0), Shard(0)), (1, 0), (1, 4)),
                )
            },
        ),
        (
            "from 1 x 4 to 2 x 2, uneven shards at first, uneven shards at last",
            {
                "case": moved(
                    (13, 13),
                    torch.float32,
                    (1, 4),
                    in_order((Shard(1), Shard(1)), (1, 0), (1, 4)),
                    (2, 2),
                    (Shard(1), Replicate()),
                )
            },
        ),
        (
            "sharded dim 2 at first, sharded dim 2 at last, from 2 x 2 to 4",
            {"case": moved((4, 1, 1), torch.float32, (2, 2), (Replicate(), Shard(2)), (4,), (Shard(2),))},
        ),
        ("from 4 to 4, int64, 0-D", {"case": moved((), torch.int64, (4,), (Replicate(),), (4,), (Replicate(),))}),
        (
            "without elements, from 1 x 4 to 1 x 4",
            {"case": moved((2, 1, 0), torch.int64, (1, 4), (Shard(1), Shard(2)), (1, 4), (Replicate(), Shard(0)))},
        ),
        (
            "from 4 x 1 to 1 x 4",
            {"case": moved((5, 1), torch.bfloat16, (4, 1), (Shard(1), Replicate()), (1, 4), (Shard(0), Shard(1)))},
        ),
        (
            "from 4 x 1 to 2 x 2",
            {"case": moved((3, 6, 11), torch.bfloat16, (4, 1), (Shard(0), Shard(2)), (2, 2), (Replicate(), Shard(0)))},
        ),
        (
            "from 2 x 2 to 2 x 2",
            {"case": moved((5,), torch.float32, (2, 2), (Replicate(), Shard(0)), (2, 2), (Shard(0), Shard(0)))},
        ),
        (
            "from 4 to 1 x 4",
            {
                "case": moved(
                    (8, 3), torch.int64, (4,), (Shard(1),), (1, 4), in_order((Shard(1), Shard(1)), (1, 0), (1, 4))
                )
            },
        ),
        (
            "from 4 x 1 to 4 x 1",
            {"case": moved((11, 13), torch.int64, (4, 1), (Shard(1), Shard(0)), (4, 1), (Shard(1), Shard(0)))},
        ),
        (
            "from 1 x 4 to 4 x 1",
            {
                "case": moved(
                    (2, 1),
                    torch.bfloat16,
                    (1, 4),
                    in_order((Shard(1), Shard(1)), (1, 0), (1, 4)),
                    (4, 1),
                    (Shard(1), Replicate()),
                )
            },
        ),
        (
            "from 4 x 1 to 4",
            {"case": moved((3, 5, 13), torch.float32, (4, 1), (Shard(1), Shard(1)), (4,), (Shard(2),))},
        ),
    ],
    3: [
        (
            "a strided shard at first, a dim that 2 mesh dims shard at first, from 1 x 3 to 3 x 1",
            {
                "case": moved(
                    (1, 13, 6),
                    torch.bfloat16,
                    (1, 3),
                    in_order((Shard(0), Shard(0)), (1, 0), (1, 3)),
                    (3, 1),
                    (Shard(1), Shard(0)),
                )
            },
        ),
        (
            "a strided shard at last, a dim that 2 mesh dims shard at last, sharded dim 2 at last",
            {
                "case": moved(
                    (11, 2, 4),
                    torch.float32,
                    (1, 3),
                    (Shard(1), Replicate()),
                    (1, 3),
                    in_order((Shard(2), Shard(2)), (1, 0), (1, 3)),
                )
            },
        ),
        (
            "from 3 x 1 to 1 x 3, uneven shards at first, 1-D",
            {"case": moved((13,), torch.int64, (3, 1), (Shard(0), Replicate()), (1, 3), (Replicate(), Shard(0)))},
        ),
        (
            "without elements, 2-D, from 3 to 3",
            {"case": moved((0, 0), torch.float32, (3,), (Replicate(),), (3,), (Replicate(),))},
        ),
        (
            "sharded dim 2 at first, from 3 to 3 x 1",
            {"case": moved((1, 13, 8), torch.float32, (3,), (Shard(2),), (3, 1), (Shard(0), Replicate()))},
        ),
        (
            "from 3 x 1 to 3, 0-D",
            {"case": moved((), torch.bfloat16, (3, 1), (Replicate(), Replicate()), (3,), (Replicate(),))},
        ),
    ],
}
NESTED_STATES = {
    4: [
        (
            "sharded dim 2 at first, a dim that 2 mesh dims shard at last, sharded dim 1 at last",
            {
                "cases": [
                    moved((6, 3, 8), torch.bfloat16, (2, 2), (Shard(0), Shard(2)), (4,), (Replicate(),)),
                    moved((2, 2), torch.int64, (1, 4), (Replicate(), Shard(1)), (4, 1), (Shard(1), Shard(1))),
                    moved((1, 13, 5), torch.float32, (2, 2), (Shard(2), Replicate()), (1, 4), (Replicate(), Shard(1))),
                ],
                "number": 2633270,
                "text": "",
            },
        ),
        (
            "a strided shard at first, a strided shard at last, a dim that 2 mesh dims shard at first",
            {
                "cases": [
                    moved((), torch.int64, (2, 2), (Replicate(), Replicate()), (2, 2), (Replicate(), Replicate())),
                    moved((), torch.int64, (1, 4), (Replicate(), Replicate()), (4,), (Replicate(),)),
                    moved(
                        (7,),
                        torch.float32,
                        (1, 4),
                        in_order((Shard(0), Shard(0)), (1, 0), (1, 4)),
                        (2, 2),
                        in_order((Shard(0), Shard(0)), (1, 0), (2, 2)),
                    ),
                ],
                "number": 578092,
                "text": "𣎙",
            },
        ),
        (
            "sharded dim 2 at last, a text of 3, 2 tensors",
            {
                "cases": [
                    moved((8,), torch.int64, (2, 2), (Shard(0), Replicate()), (4,), (Replicate(),)),
                    moved((6, 4, 4), torch.bfloat16, (1, 4), (Shard(2), Replicate()), (4, 1), (Shard(2), Shard(0))),
                ],
                "number": -1345709,
                "text": "\x0f!𗻢",
            },
        ),
        (
            "without elements, number 0, 1 tensors",
            {
                "cases": [moved((0,), torch.float32, (4,), (Replicate(),), (4,), (Replicate(),))],
                "number": 0,
                "text": "",
            },
        ),
        (
            "number 1",
            {
                "cases": [
                    moved((1, 2, 8), torch.float32, (4, 1), (Shard(1), Shard(2)), (4,), (Shard(1),)),
                    moved((6,), torch.float32, (4, 1), (Shard(0), Shard(0)), (2, 2), (Replicate(), Shard(0))),
                    moved((7, 11, 2), torch.bfloat16, (4, 1), (Replicate(), Replicate()), (4,), (Shard(1),)),
                ],
                "number": 1,
                "text": "",
            },
        ),
        (
            "a text of 2",
            {
                "cases": [
                    moved((), torch.bfloat16, (4, 1), (Replicate(), Replicate()), (2, 2), (Replicate(), Replicate())),
                    moved((11, 0, 5), torch.bfloat16, (1, 4), (Shard(1), Shard(2)), (4, 1), (Shard(2), Shard(1))),
                    moved((8, 7), torch.bfloat16, (4,), (Replicate(),), (4, 1), (Shard(1), Replicate())),
                ],
                "number": -2500065903879,
                "text": "\U0006f216\x19",
            },
        ),
        (
            "number 3",
            {
                "cases": [
                    moved((), torch.bfloat16, (4, 1), (Replicate(), Replicate()), (4, 1), (Replicate(), Replicate())),
                    moved((1, 2, 1), torch.float32, (4,), (Replicate(),), (4,), (Shard(2),)),
                ],
                "number": 3,
                "text": "",
            },
        ),
        (
            "number 2",
            {
                "cases": [moved((13, 4), torch.bfloat16, (4,), (Shard(1),), (2, 2), (Shard(0), Replicate()))],
                "number": 2,
                "text": "",
            },
        ),
    ],
    3: [
        (
            "a text of 2, uneven shards at first, uneven shards at last",
            {
                "cases": [
                    moved((), torch.int64, (1, 3), (Replicate(), Replicate()), (3, 1), (Replicate(), Replicate())),
                    moved((3, 8, 1), torch.int64, (3,), (Shard(1),), (3,), (Shard(1),)),
                    moved((6,), torch.bfloat16, (1, 3), (Shard(0), Replicate()), (3,), (Shard(0),)),
                ],
                "number": -10663,
                "text": "M\r",
            },
        ),
        (
            "a dim that 2 mesh dims shard at last, a dim that 2 mesh dims shard at first, a rank without rows at first",
            {
                "cases": [
                    moved((11, 7), torch.float32, (3,), (Replicate(),), (1, 3), (Shard(1), Shard(1))),
                    moved((1,), torch.float32, (3, 1), (Shard(0), Shard(0)), (1, 3), (Shard(0), Shard(0))),
                    moved((1, 1), torch.float32, (3,), (Shard(0),), (3, 1), (Shard(1), Replicate())),
                ],
                "number": 1,
                "text": "",
            },
        ),
        (
            "a strided shard at first, a text of 1, 2 tensors",
            {
                "cases": [
                    moved(
                        (11,),
                        torch.float32,
                        (1, 3),
                        in_order((Shard(0), Shard(0)), (1, 0), (1, 3)),
                        (3, 1),
                        (Shard(0), Shard(0)),
                    ),
                    moved((4, 3), torch.float32, (1, 3), (Shard(1), Replicate()), (3, 1), (Replicate(), Replicate())),
                ],
                "number": 2436,
                "text": "\x9e",
            },
        ),
        (
            "sharded dim 2 at first, sharded dim 2 at last, without elements",
            {
                "cases": [
                    moved((), torch.int64, (3, 1), (Replicate(), Replicate()), (3, 1), (Replicate(), Replicate())),
                    moved((3, 6, 4), torch.float32, (1, 3), (Shard(2), Replicate()), (3,), (Shard(2),)),
                    moved((0,), torch.bfloat16, (3,), (Shard(0),), (3,), (Replicate(),)),
                ],
                "number": 4748,
                "text": "",
            },
        ),
        (
            "number 4, a strided shard at last",
            {
                "cases": [
                    moved((1, 4), torch.bfloat16, (3,), (Replicate(),), (3, 1), (Shard(1), Shard(1))),
                    moved((), torch.bfloat16, (1, 3), (Replicate(), Replicate()), (3,), (Replicate(),)),
                    moved(
                        (2, 4, 1),
                        torch.bfloat16,
                        (3,),
                        (Shard(1),),
                        (1, 3),
                        in_order((Shard(1), Shard(1)), (1, 0), (1, 3)),
                    ),
                ],
                "number": 4,
                "text": "",
            },
        ),
        (
            "a text of 3, 1 tensors",
            {
                "cases": [moved((1,), torch.bfloat16, (3, 1), (Shard(0), Shard(0)), (3, 1), (Replicate(), Shard(0)))],
                "number": -72656825603057,
                "text": "«}\U0010dd63",
            },
        ),
    ],
}
