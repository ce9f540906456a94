"""The examples of test_redistribute_properties.py, by value; choose_examples.py chose them."""

from torch.distributed.tensor import Partial, Replicate, Shard

from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, whole_numbers


def there_and_back(shape, mesh, source, target):
    full = whole_numbers(shape)
    return {"case": (DTensorPlan(full, MeshPlan(mesh), source), full, target)}


def in_another_order(shape, mesh, dim, order, others):
    """All dims of the mesh shard one dim of the tensor, in this order."""
    return {"case": (MeshPlan(mesh), whole_numbers(shape), dim, order, others)}


ON_1D_MESHES = {
    4: [
        (
            "Shard(2) to Shard(2), sharded dim 2 at last, sharded dim 2 at first",
            there_and_back((1, 1, 6), (4,), (Shard(2),), (Shard(2),)),
        ),
        (
            "uneven shards at first, Shard(0) to Shard(0), uneven shards at last",
            there_and_back((7,), (4,), (Shard(0),), (Shard(0),)),
        ),
        (
            "Shard(1) to Shard(1), sharded dim 1 at first, sharded dim 1 at last",
            there_and_back((2, 2), (4,), (Shard(1),), (Shard(1),)),
        ),
        (
            "Replicate() to Replicate(), replicated at first, replicated at last",
            there_and_back((2, 1), (4,), (Replicate(),), (Replicate(),)),
        ),
        ("Partial() to Shard(0), partial at first", there_and_back((2,), (4,), (Partial(),), (Shard(0),))),
        ("Shard(1) to Replicate()", there_and_back((13, 13, 1), (4,), (Shard(1),), (Replicate(),))),
        ("Replicate() to Shard(0)", there_and_back((2, 1, 1), (4,), (Replicate(),), (Shard(0),))),
        ("Shard(0) to Replicate()", there_and_back((2,), (4,), (Shard(0),), (Replicate(),))),
        ("Partial() to Shard(1)", there_and_back((2, 7), (4,), (Partial(),), (Shard(1),))),
        ("Shard(1) to Shard(0)", there_and_back((2, 2), (4,), (Shard(1),), (Shard(0),))),
        ("Replicate() to Shard(2)", there_and_back((7, 2, 7), (4,), (Replicate(),), (Shard(2),))),
        ("Partial() to Replicate()", there_and_back((1, 11, 11), (4,), (Partial(),), (Replicate(),))),
        ("Shard(2) to Shard(0)", there_and_back((2, 1, 4), (4,), (Shard(2),), (Shard(0),))),
        ("Shard(0) to Shard(2)", there_and_back((3, 3, 4), (4,), (Shard(0),), (Shard(2),))),
        ("Replicate() to Shard(1)", there_and_back((6, 6, 2), (4,), (Replicate(),), (Shard(1),))),
        ("Shard(2) to Replicate()", there_and_back((5, 8, 7), (4,), (Shard(2),), (Replicate(),))),
        ("Shard(1) to Shard(2)", there_and_back((8, 2, 4), (4,), (Shard(1),), (Shard(2),))),
        ("Partial() to Shard(2)", there_and_back((6, 8, 8), (4,), (Partial(),), (Shard(2),))),
        ("without elements", there_and_back((0, 1), (4,), (Replicate(),), (Replicate(),))),
    ],
    3: [
        (
            "Shard(1) to Shard(1), sharded dim 1 at first, sharded dim 1 at last",
            there_and_back((1, 4), (3,), (Shard(1),), (Shard(1),)),
        ),
        (
            "Shard(0) to Shard(0), uneven shards at first, sharded dim 0 at first",
            there_and_back((13, 1, 1), (3,), (Shard(0),), (Shard(0),)),
        ),
        (
            "Replicate() to Replicate(), 1-D, replicated at first",
            there_and_back((2,), (3,), (Replicate(),), (Replicate(),)),
        ),
        (
            "Shard(2) to Shard(2), sharded dim 2 at last, sharded dim 2 at first",
            there_and_back((3, 3, 4), (3,), (Shard(2),), (Shard(2),)),
        ),
        ("Partial() to Shard(0), partial at first", there_and_back((2,), (3,), (Partial(),), (Shard(0),))),
        ("Shard(1) to Replicate()", there_and_back((13, 13, 1), (3,), (Shard(1),), (Replicate(),))),
        ("Shard(0) to Replicate()", there_and_back((2,), (3,), (Shard(0),), (Replicate(),))),
        ("Replicate() to Shard(0)", there_and_back((2, 1, 1), (3,), (Replicate(),), (Shard(0),))),
        ("Shard(2) to Shard(0)", there_and_back((2, 1, 4), (3,), (Shard(2),), (Shard(0),))),
        ("Partial() to Shard(1)", there_and_back((2, 7), (3,), (Partial(),), (Shard(1),))),
        ("Shard(1) to Shard(2)", there_and_back((8, 2, 8), (3,), (Shard(1),), (Shard(2),))),
        ("Partial() to Replicate()", there_and_back((2, 1), (3,), (Partial(),), (Replicate(),))),
    ],
}
ON_2D_MESHES = {
    4: [
        (
            "Shard(0) to Shard(0), uneven shards at first, uneven shards at last",
            there_and_back((3,), (2, 2), (Replicate(), Shard(0)), (Replicate(), Shard(0))),
        ),
        (
            "Shard(1) to Shard(1), sharded dim 1 at first, a dim that 2 mesh dims shard at first",
            there_and_back((1, 2), (4, 1), (Shard(1), Shard(1)), (Shard(1), Shard(1))),
        ),
        (
            "Shard(2) to Shard(2), sharded dim 2 at first, sharded dim 2 at last",
            there_and_back((1, 5, 5), (1, 4), (Partial(), Shard(2)), (Shard(2), Shard(2))),
        ),
        (
            "Partial() to Shard(1), Shard(1) to Replicate()",
            there_and_back((4, 5), (2, 2), (Shard(1), Partial()), (Replicate(), Shard(1))),
        ),
        (
            "Shard(2) to Shard(0), Shard(1) to Shard(2)",
            there_and_back((13, 11, 3), (2, 2), (Shard(1), Shard(2)), (Shard(2), Shard(0))),
        ),
        (
            "Partial() to Shard(0), Replicate() to Shard(0)",
            there_and_back((2,), (2, 2), (Partial(), Replicate()), (Shard(0), Shard(0))),
        ),
        (
            "Shard(0) to Shard(1), Replicate() to Shard(2)",
            there_and_back((13, 3, 11), (2, 2), (Replicate(), Shard(0)), (Shard(2), Shard(1))),
        ),
        (
            "Replicate() to Shard(1), Shard(0) to Replicate()",
            there_and_back((3, 3), (2, 2), (Replicate(), Shard(0)), (Shard(1), Replicate())),
        ),
        (
            "Shard(2) to Replicate(), Partial() to Replicate()",
            there_and_back((7, 3, 5), (2, 2), (Shard(2), Partial()), (Replicate(), Replicate())),
        ),
        ("Shard(2) to Shard(1)", there_and_back((6, 11, 2), (4, 1), (Shard(2), Shard(2)), (Shard(1), Shard(0)))),
        ("Shard(0) to Shard(2)", there_and_back((2, 1, 5), (2, 2), (Partial(), Shard(0)), (Shard(0), Shard(2)))),
        ("Shard(1) to Shard(0)", there_and_back((6, 6), (1, 4), (Replicate(), Shard(1)), (Replicate(), Shard(0)))),
        ("Partial() to Shard(2)", there_and_back((5, 3, 5), (2, 2), (Partial(), Replicate()), (Shard(2), Replicate()))),
        ("without elements", there_and_back((0,), (4, 1), (Replicate(), Replicate()), (Replicate(), Replicate()))),
        (
            "Shard(0) to Replicate() with Shard(0) to Shard(0)",
            there_and_back((2,), (2, 2), (Shard(0), Shard(0)), (Replicate(), Shard(0))),
        ),
        (
            "Shard(1) to Shard(0) with sharded dim 0 at first",
            there_and_back((6, 11, 2), (4, 1), (Shard(1), Shard(0)), (Shard(0), Shard(0))),
        ),
        (
            "Shard(0) to Shard(0) with mesh of 1 x 4",
            there_and_back((11,), (1, 4), (Shard(0), Shard(0)), (Shard(0), Shard(0))),
        ),
        (
            "Replicate() to Replicate() with Shard(1) to Shard(1)",
            there_and_back((4, 5), (2, 2), (Replicate(), Shard(1)), (Replicate(), Shard(1))),
        ),
        (
            "Replicate() to Shard(0) with Shard(1) to Replicate()",
            there_and_back((7, 7, 7), (2, 2), (Shard(1), Replicate()), (Replicate(), Shard(0))),
        ),
        (
            "Replicate() to Replicate() with Shard(2) to Shard(2)",
            there_and_back((7, 7, 7), (2, 2), (Replicate(), Shard(2)), (Replicate(), Shard(2))),
        ),
    ],
    3: [
        (
            "Shard(1) to Shard(1), uneven shards at first, sharded dim 1 at first",
            there_and_back((1, 5), (1, 3), (Shard(1), Shard(1)), (Shard(1), Shard(1))),
        ),
        (
            "Shard(0) to Shard(0), a rank without rows at first, a rank without rows at last",
            there_and_back((2,), (3, 1), (Shard(0), Replicate()), (Shard(0), Replicate())),
        ),
        (
            "Partial() to Shard(2), sharded dim 2 at last, sharded dim 2 at first",
            there_and_back((1, 5, 5), (3, 1), (Partial(), Shard(2)), (Shard(2), Shard(2))),
        ),
        ("Shard(2) to Shard(1)", there_and_back((3, 8, 5), (1, 3), (Replicate(), Shard(2)), (Replicate(), Shard(1)))),
        ("Shard(1) to Shard(0)", there_and_back((4, 11), (1, 3), (Partial(), Shard(1)), (Shard(1), Shard(0)))),
        ("Shard(1) to Shard(2)", there_and_back((1, 5, 5), (3, 1), (Shard(1), Replicate()), (Shard(2), Shard(2)))),
        ("Shard(0) to Shard(2)", there_and_back((11, 3, 2), (3, 1), (Shard(0), Shard(2)), (Shard(2), Replicate()))),
        ("Shard(0) to Replicate()", there_and_back((2,), (1, 3), (Shard(0), Shard(0)), (Shard(0), Replicate()))),
        ("Replicate() to Shard(1)", there_and_back((6, 7), (3, 1), (Replicate(), Shard(0)), (Shard(1), Replicate()))),
        ("Partial() to Shard(0)", there_and_back((4,), (1, 3), (Shard(0), Partial()), (Shard(0), Shard(0)))),
        ("Shard(2) to Replicate()", there_and_back((8, 2, 2), (1, 3), (Partial(), Shard(2)), (Shard(2), Replicate()))),
        ("Shard(2) to Shard(2)", there_and_back((8, 5, 11), (3, 1), (Shard(2), Shard(2)), (Shard(2), Replicate()))),
    ],
}
IN_ANOTHER_ORDER = {
    4: [
        (
            "uneven shards at last, sharded dim 1 at last, a rank without rows at last",
            in_another_order((3, 1), (2, 1, 2), 1, (1, 2, 0), (Shard(0), Partial(), Shard(1))),
        ),
        (
            "sharded dim 2 at last, mesh of 4 x 1, a dim that 2 mesh dims shard",
            in_another_order((13, 1, 6), (4, 1), 0, (1, 0), (Replicate(), Shard(2))),
        ),
        (
            "a dim that 2 mesh dims shard at last, mesh of 4 x 1 x 1, mesh dims in the order (1, 0, 2)",
            in_another_order((1,), (4, 1, 1), 0, (1, 0, 2), (Shard(0), Replicate(), Shard(0))),
        ),
        (
            "sharded dim 2, mesh dims in the order (0, 2, 1), mesh of 1 x 1 x 4",
            in_another_order((3, 8, 11), (1, 1, 4), 2, (0, 2, 1), (Replicate(), Shard(2), Partial())),
        ),
        (
            "mesh of 1 x 2 x 2, without elements, mesh dims in the order (2, 0, 1)",
            in_another_order((0, 3), (1, 2, 2), 0, (2, 0, 1), (Replicate(), Replicate(), Replicate())),
        ),
        (
            "a dim that 3 mesh dims shard at last, mesh of 2 x 2 x 1",
            in_another_order((13, 1, 4), (2, 2, 1), 0, (1, 0, 2), (Shard(1), Shard(1), Shard(1))),
        ),
        (
            "mesh of 1 x 4 x 1, mesh dims in the order (2, 1, 0)",
            in_another_order((5, 7, 5), (1, 4, 1), 1, (2, 1, 0), (Partial(), Replicate(), Shard(0))),
        ),
        ("mesh of 2 x 2", in_another_order((2, 2, 2), (2, 2), 2, (1, 0), (Shard(0), Shard(0)))),
        ("mesh of 1 x 4", in_another_order((4, 6), (1, 4), 1, (1, 0), (Replicate(), Shard(1)))),
        (
            "mesh of 1 x 2 x 2 with uneven shards at last",
            in_another_order((5,), (1, 2, 2), 0, (0, 2, 1), (Partial(), Shard(0), Replicate())),
        ),
        (
            "mesh of 1 x 1 x 4 with uneven shards at last",
            in_another_order((4, 8, 11), (1, 1, 4), 0, (2, 1, 0), (Shard(1), Shard(1), Shard(2))),
        ),
        (
            "mesh dims in the order (2, 0, 1) with uneven shards at last",
            in_another_order((5, 11), (2, 2, 1), 1, (2, 0, 1), (Shard(0), Replicate(), Partial())),
        ),
    ],
    3: [
        (
            "mesh dims in the order (1, 2, 0), a rank without rows at last, mesh of 1 x 1 x 3",
            in_another_order((1,), (1, 1, 3), 0, (1, 2, 0), (Partial(), Replicate(), Shard(0))),
        ),
        (
            "uneven shards at last, sharded dim 2 at last, sharded dim 1 at last",
            in_another_order((5, 13, 4), (1, 3, 1), 1, (0, 2, 1), (Shard(2), Shard(1), Partial())),
        ),
        (
            "a dim that 2 mesh dims shard at last, mesh of 1 x 3, 2-D",
            in_another_order((1, 1), (1, 3), 1, (1, 0), (Shard(0), Shard(0))),
        ),
        (
            "sharded dim 2, mesh dims in the order (1, 0, 2), mesh of 3 x 1 x 1",
            in_another_order((4, 4, 2), (3, 1, 1), 2, (1, 0, 2), (Shard(1), Replicate(), Shard(2))),
        ),
        (
            "a dim that 3 mesh dims shard at last, mesh dims in the order (2, 0, 1)",
            in_another_order((5,), (1, 3, 1), 0, (2, 0, 1), (Shard(0), Shard(0), Shard(0))),
        ),
        ("without elements, mesh of 3 x 1", in_another_order((0,), (3, 1), 0, (1, 0), (Replicate(), Replicate()))),
        (
            "mesh dims in the order (2, 1, 0)",
            in_another_order((3, 5, 11), (1, 1, 3), 1, (2, 1, 0), (Replicate(), Shard(2), Shard(2))),
        ),
        (
            "a dim that 2 mesh dims shard at last with mesh of 3 x 1",
            in_another_order((8, 8), (3, 1), 0, (1, 0), (Shard(1), Shard(1))),
        ),
    ],
}
