"""The strategies from which property tests draw: tensors, meshes, placements, groups, programs of collectives."""
