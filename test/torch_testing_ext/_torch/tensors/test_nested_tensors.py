"""Tensors in lists, tuples and dicts are found in their order."""

from collections import OrderedDict, namedtuple

import torch

from torch_testing_ext._torch.tensors.nested_tensors import tensors_in

Pair = namedtuple("Pair", "left right")


def test_tensors():
    a, b, c, d = (torch.full((1,), number) for number in range(4))
    value = [a, (b, "text", None), {"x": {"y": c}, 1: 2.5}, OrderedDict(z=Pair(d, a))]
    assert [id(found) for found in tensors_in(value)] == [*map(id, (a, b, c, d, a))]
    assert [*tensors_in(a)] == [a]


def test_nothing():
    for value in (None, "text", 3, [], {torch.ones(1): 1}, {1, 2}):
        assert [*tensors_in(value)] == []
