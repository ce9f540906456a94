"""Strategies for programs of several ranks.

`hypothesis_utils` offers them to tests.

    world_strategies      values for each rank, device meshes, partitions of the ranks into groups
    tensor_strategies     shapes, dtypes, tensors
    placement_strategies  placements, DTensors
"""
