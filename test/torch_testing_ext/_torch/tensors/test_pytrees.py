"""Containers of tensors are taken apart and put together."""

import torch

from torch_testing_ext._torch.tensors import pytrees

TREE = {"a": [torch.ones(1), 2], "b": (None, torch.zeros(2))}


def test_leaves():
    leaves, spec = pytrees.tree_flatten(TREE)
    assert leaves == pytrees.tree_leaves(TREE) and leaves[1:3] == [2, None]
    again = pytrees.tree_unflatten(leaves, spec)
    assert again["b"][1] is TREE["b"][1] and [*again] == ["a", "b"]


def test_maps():
    assert pytrees.tree_map(type, TREE) == {"a": [torch.Tensor, int], "b": (type(None), torch.Tensor)}
    sizes = pytrees.tree_map_only(torch.Tensor, len, TREE)
    assert sizes == {"a": [1, 2], "b": (None, 2)}


def test_paths():
    paths, _ = pytrees.tree_flatten_with_path(TREE)
    assert [pytrees.keystr(path) for path, _ in paths] == ["['a'][0]", "['a'][1]", "['b'][0]", "['b'][1]"]
