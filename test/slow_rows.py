"""Slow tests that cannot have `@pytest.mark.slow` or `@pytest.mark.nightly` where they are written.

A mark on a function is of all rows of its table, and the suites in `test/distributed` run without pytest, too. A row is
a pattern of `fnmatch` for the ids of tests, below `test/`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

OURS = "torch_testing_ext/"
SUITES = "distributed/"
COMPILED = f"{SUITES}_composable/test_replicate_with_compiler.py::"
TENSOR_PARALLEL = f"{SUITES}tensor/parallel/test_tp_examples.py::DistTensorParallelExampleTest::"

SLOW_ROWS = (
    f"{OURS}_collectives/test_no_false_alarms.py::*::test_a_busy_rank",
    f"{OURS}_collectives/test_no_false_alarms.py::*::test_messages_in_a_compiled_function",
    f"{OURS}_collectives/test_planted_sanitized.py::*::test_order_of_a_set_fresh",
    f"{OURS}_collectives/test_sanitized_sound.py::*_compiled",
    f"{OURS}faults/test_fsdp_suites_catch_faults.py::*_matches_single_device_*",
    f"{OURS}faults/test_tp_suites_catch_faults.py::*::test_fails_sequence_is_not_parallel_*",
    f"{OURS}test_expected_faults.py::*::test_kill_at_step",
    f"{OURS}test_found.py::*_amax_of_a_rank_without_elements",
    f"{OURS}test_found.py::*_endless_search_for_attention",
    f"{OURS}test_planted_recovery.py::*::test_survives_soon_keeps_old_group",
    f"{OURS}test_planted_recovery.py::*::test_survives_soon_retries_for_ever",
    f"{OURS}upstream/test_drop_in.py::*_spawned",
)
# The README's main command runs the suites with every change; a night runs them by pytest, too.
NIGHTLY_ROWS = (
    f"{SUITES}properties/*_properties.py::*",
    f"{SUITES}properties/test_fault_tolerance.py::TestRecovery::test_no_loss_hangs",
    f"{SUITES}properties/test_fault_tolerance.py::TestTorchrun::*",
    f"{SUITES}properties/test_fully_shard_tp_integration.py::*_matches_single_device_*",
    f"{SUITES}fsdp/test_fsdp_tp_integration.py::*::test_fsdp_tp_integration",
    f"{COMPILED}ReplicateTest::test_bucketing_*",
    f"{COMPILED}ReplicateTest::test_compile_*cpu*",
    f"{COMPILED}DDP_TP_Test::*",
    f"{SUITES}tensor/parallel/test_ddp_2d_parallel.py::*::test_2d_ddp_save_and_load_*",
    f"{TENSOR_PARALLEL}test_loss_parallel",
    f"{TENSOR_PARALLEL}test_mlp_inference",
    f"{TENSOR_PARALLEL}test_transformer_*",
)


def marks_of_row(nodeid: str) -> tuple[str, ...]:
    """The marks that rows give to a test. `nodeid`: its id, from the root of the checkout."""
    name = nodeid.removeprefix("test/")
    tables = {"nightly": NIGHTLY_ROWS, "slow": SLOW_ROWS}
    return tuple(mark for mark, rows in tables.items() if any(fnmatchcase(name, row) for row in rows))
