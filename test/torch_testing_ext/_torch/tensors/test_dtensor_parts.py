"""Meshes, caches, specs and sharding rules of DTensor, and local tensors."""

import sys
from unittest import mock

import pytest
import torch
import torch.distributed.tensor
from kit.own_process import in_own_process
from kit.plain_groups import fake_world

from torch_testing_ext._torch.tensors import dtensor_parts


def mesh(*sizes, names=None, rank=0):
    from torch.distributed.tensor import init_device_mesh

    fake_world(4, rank)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def test_kinds():
    assert not dtensor_parts.is_local_tensor(torch.ones(1))
    assert not dtensor_parts.is_functional_tensor(torch.ones(1))
    assert dtensor_parts.is_functional_tensor(torch._to_functional_tensor(torch.ones(1)))


@in_own_process
def test_concatenated_meshes():
    root = mesh(2, 2, names=("a", "b"))
    both = dtensor_parts.concatenate_meshes([root["b"], root["a"]])
    assert both.mesh_dim_names == ("b", "a") and both.mesh.tolist() == root.mesh.t().tolist()


@in_own_process
def test_forgotten_meshes():
    with mock.patch.dict(sys.modules):
        for name in ("torch.distributed.tensor", "torch.distributed.tensor._random"):
            sys.modules.pop(name, None)
        dtensor_parts.forget_meshes()
        dtensor_parts.forget_dtensor_rng()
        assert "torch.distributed.tensor" not in sys.modules
    from torch.distributed.tensor import Replicate, Shard, _random, _redistribute, distribute_tensor

    tensor = distribute_tensor(torch.ones(4), mesh(4), [Shard(0)])
    tensor.redistribute(placements=[Replicate()])
    cache = _redistribute._gen_transform_infos.cache_info
    assert cache().currsize
    dtensor_parts.forget_meshes()
    assert not cache().currsize
    _random._rng_tracker = object()
    dtensor_parts.forget_dtensor_rng()
    assert _random._rng_tracker is None


@in_own_process
def test_specs():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = mesh(2, 2)
    tensor = distribute_tensor(torch.arange(8.0), grid, [Shard(0), Replicate()])
    other = distribute_tensor(torch.arange(8.0), grid, [Replicate(), Shard(0)])
    spec = dtensor_parts.spec_of(other)
    dtensor_parts.set_spec(tensor, spec)
    assert tensor.placements == (Replicate(), Shard(0)) and dtensor_parts.spec_of(tensor) is spec
    strided = dtensor_parts.strided_shard(1, 2)
    assert (strided.dim, strided.split_factor) == (1, 2)
    (entry,) = dtensor_parts.shard_order({0: [1, 0]})
    assert (entry.tensor_dim, entry.mesh_dims) == (0, (1, 0))
    spec = type(spec)(grid, (dtensor_parts.strided_shard(0, 2), Shard(0)))
    assert spec.use_strided_shard_as_shard_order
    read_as_order = spec.placements, spec.shard_order
    dtensor_parts.take_placements_literally(spec)
    assert not spec.use_strided_shard_as_shard_order and (spec.placements, spec.shard_order) != read_as_order


@in_own_process
def test_parts_of_a_rank():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = mesh(4)
    tensor = distribute_tensor(torch.arange(8.0), grid, [Replicate()])
    target = dtensor_parts.spec_of(distribute_tensor(torch.arange(8.0), grid, [Shard(0)]))
    before = dtensor_parts.spec_of(tensor)
    part = dtensor_parts.redistribute_local(tensor.to_local(), before, target, use_graph_based_transform=False)
    assert part.tolist() == [0, 1]


def indices_on_all_ranks(sizes, placements):
    """The rows and columns of a matrix of 7 x 3 that each of four ranks holds; None for all."""
    from torch.distributed.tensor import DTensor

    found = []
    for rank in range(4):
        grid = mesh(*sizes, rank=rank)
        whole = {"run_check": False, "shape": torch.Size((7, 3)), "stride": (3, 1)}
        tensor = DTensor.from_local(torch.zeros(1, 1), grid, placements, **whole)
        indices = dtensor_parts.indices_of_local(tensor)
        found.append(tuple(each if each is None else each.tolist() for each in indices))
        torch.distributed.destroy_process_group()
    return found


@in_own_process
def test_indices_of_parts():
    from torch.distributed.tensor import Partial, Replicate, Shard

    rows, strided = Shard(0), dtensor_parts.strided_shard(0, 2)
    assert indices_on_all_ranks([4], [rows]) == [([0, 1], None), ([2, 3], None), ([4, 5], None), ([6], None)]
    # The last rank has no column.
    assert indices_on_all_ranks([4], [Shard(1)]) == [(None, [0]), (None, [1]), (None, [2]), (None, [])]
    for held in (Replicate(), Partial()):
        assert indices_on_all_ranks([2, 2], [held, rows]) == [([0, 1, 2, 3], None), ([4, 5, 6], None)] * 2
        assert indices_on_all_ranks([2, 2], [held, held]) == [(None, None)] * 4
    both = [([0, 1, 2, 3], [0, 1]), ([0, 1, 2, 3], [2]), ([4, 5, 6], [0, 1]), ([4, 5, 6], [2])]
    assert indices_on_all_ranks([2, 2], [rows, Shard(1)]) == both
    # Twice along the rows: from left to right, or as fully_shard does within tensor parallelism.
    assert [each[0] for each in indices_on_all_ranks([2, 2], [rows, rows])] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [each[0] for each in indices_on_all_ranks([2, 2], [strided, rows])] == [[0, 1], [4, 5], [2, 3], [6]]


@in_own_process
def test_rules():
    """A rule of ours holds within its context, and that of torch after it, also after an error."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    op = torch.ops.aten.neg.default
    tensor = distribute_tensor(torch.ones(4), mesh(4), [Shard(0)])
    tables = vars(DTensor._op_dispatcher.sharding_propagator)

    def known():
        return [tables[name].get(op) for name in dtensor_parts._STRATEGY_TABLES if name in tables]

    before = known()
    assert any(before) and (-tensor).placements == (Shard(0),)

    def refuse(*_):
        raise PermissionError("ours")

    with dtensor_parts.replaced_op_strategy(op, refuse, None), pytest.raises(Exception, match="ours"):
        torch.neg(tensor)
    assert known() == before and (-tensor).placements == (Shard(0),)
    with pytest.raises(ZeroDivisionError), dtensor_parts.replaced_op_strategy(op, refuse, None):
        raise ZeroDivisionError
    assert known() == before and Replicate() not in (-tensor).placements


@in_own_process
def test_local_tensors():
    fake_world(2)
    with dtensor_parts.local_tensor_mode(2):
        tensor = torch.ones(2)
        number = dtensor_parts.local_ranks(2)
        assert dtensor_parts.local_ints(number + 5) == {0: 5, 1: 6}
        called = []
        dtensor_parts.for_each_local_rank(lambda one: called.append(type(one)) or one)(tensor)
        with dtensor_parts.without_local_tensors():
            assert not dtensor_parts.is_local_tensor(torch.ones(1))
    assert dtensor_parts.is_local_tensor(tensor) and called == [torch.Tensor] * 2


@in_own_process
def test_events_of_autograd():
    parameter = torch.ones(1, requires_grad=True)

    def events():
        with torch.profiler.profile() as profile:
            (parameter * 2).sum().backward()
        return [event.key for event in profile.key_averages() if event.key.startswith("autograd::engine")]

    assert events()
    dtensor_parts.record_autograd(False)
    try:
        assert not events()
    finally:
        dtensor_parts.record_autograd(True)
    assert events()
