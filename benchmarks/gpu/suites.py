"""The suites that use accelerators where there are enough."""

SUITES = (
    "test/distributed/properties/test_fully_shard_tp_integration.py",
    "test/distributed/fsdp/test_fsdp_tp_integration.py",
    "test/distributed/tensor/parallel/test_ddp_2d_parallel.py",
    "test/distributed/tensor/parallel/test_tp_examples.py",
    "test/distributed/_composable/test_replicate_with_compiler.py",
    "test/distributed/_spmd/test_data_parallel.py",
)
