"""Bases, models and checks for tests of FSDP, DTensor and checkpoints.

Only the mirror takes them. They import the other rooms of `_testing`.

    dtensor_bases         the bases of DTensor tests
    dtensor_devices       their devices and number of ranks
    local_tensor_bases    their bases on local tensors, without ranks
    dtensor_converter     a call with its arguments placed in all ways
    shard_orders          dimensions sharded over several mesh dimensions
    sharding_rule_checks  checks of a sharding rule
    fsdp_bases            the bases of FSDP tests
    fsdp_training         training under FSDP beside a reference
    fsdp_states           parameters and state dicts
    fsdp_patches          patches of FSDP2's internals
    fsdp_devices          the device of FSDP's helpers
    fsdp1_models          models that wrap themselves
    fsdp2_models          models that a test shards
    wrapper_models        models for tests of wrappers
    layer_models          small models of plain layers
    experts               a layer of experts, and styles that shard it
    transformer           a small transformer, and its plans
    state_dict_checks     checks of distributed state dicts
    rot13_extension       an extension of checkpoints' storage
"""
