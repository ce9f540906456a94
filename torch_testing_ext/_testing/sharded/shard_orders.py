"""DTensors with a dimension that is sharded over several mesh dimensions in a chosen order.

DTensor itself always goes from the first mesh dimension to the last. These helpers use its internals, in order to test
them; forward only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torch_testing_ext._torch.tensors import dtensor_parts

__unittest = True
# Each entry: a tensor dimension, and the mesh dimensions that shard it, in order.
ShardOrder = tuple[Any, ...]


def generate_shard_orders(mesh: DeviceMesh, tensor_rank: int) -> Iterator[ShardOrder]:
    """Generate every order that uses all mesh dimensions: permute them, split them into runs, one per tensor dim."""
    for order in itertools.permutations(range(mesh.ndim)):
        for count in range(1, mesh.ndim + 1):
            for cuts in itertools.combinations(range(1, mesh.ndim), count - 1):
                runs = [order[start:end] for start, end in itertools.pairwise((0, *cuts, mesh.ndim))]
                for dims in itertools.combinations(range(tensor_rank), count):
                    yield dtensor_parts.shard_order(dict(zip(dims, runs, strict=True)))


def shard_order_to_placement(shard_order: ShardOrder | None, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of a shard order, which do not contain the order itself."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for entry in shard_order or ():
        for mesh_dim in entry.mesh_dims:
            placements[mesh_dim] = Shard(entry.tensor_dim)
    return tuple(placements)


def redistribute(
    dtensor_input: DTensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shard_order: ShardOrder | None,
    use_graph_based_transform: bool = True,
) -> DTensor:
    """Redistribute to these placements, or if None to those of the shard order, sharded in that order."""
    before = dtensor_parts.spec_of(dtensor_input)
    after = deepcopy(before)
    if placements is None:
        placements = shard_order_to_placement(shard_order, device_mesh)
    after.placements = tuple(placements)
    after.shard_order = shard_order or ()
    if after == before:
        return dtensor_input
    local = dtensor_parts.redistribute_local(dtensor_input.to_local(), before, after, use_graph_based_transform)
    redistributed = DTensor.from_local(local, device_mesh)
    dtensor_parts.set_spec(redistributed, deepcopy(after))
    return redistributed


def patched_distribute_tensor(
    input_tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shard_order: ShardOrder | None,
    use_graph_based_transform: bool = True,
    src_data_rank: int | None = 0,
) -> DTensor:
    if placements is None:
        placements = shard_order_to_placement(shard_order, device_mesh)
    distributed = distribute_tensor(input_tensor, device_mesh, tuple(placements), src_data_rank=src_data_rank)
    dtensor_parts.take_placements_literally(dtensor_parts.spec_of(distributed))
    return redistribute(distributed, device_mesh, tuple(placements), shard_order, use_graph_based_transform)


def make_full_tensor(dtensor_input: DTensor) -> torch.Tensor:
    mesh = dtensor_input.device_mesh
    replicated = redistribute(dtensor_input, mesh, placements=None, shard_order=())
    return replicated.to_local()
