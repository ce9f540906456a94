"""The mechanisms that can only be seen end to end, each with a test of it that is in `core`, whatever it costs.

Every other test of `core` costs at most 1 second of CPU: see `tiers.py`. A row is the id of one test, below `test/`.
It may be of a class that `slow_tests.py` names as a whole. A mechanism of which a cheap test is in `core` needs no row.
"""

from __future__ import annotations

OURS = "torch_testing_ext/"
RUNNER = f"{OURS}runner/"

CORE: dict[str, str] = {
    "a run that is interrupted": f"{RUNNER}test_ways_out.py::SignalsTest::test_signals",
    "agents on nodes": f"{RUNNER}test_agent.py::OneRunTest::test_outcomes",
    "a cluster of Ray": f"{RUNNER}test_cluster.py::TestOnRay::test_one_run",
    "an allocation of Slurm": f"{RUNNER}test_slurm.py::InAllocationTest::test_one_run",
    "runs that share devices": f"{RUNNER}test_shared_leases.py::ConcurrentRunsTest::test_waiting_is_shown_and_ends",
    "the page of a run in a browser": (
        f"{RUNNER}test_html_report.py::InABrowserTest::test_everything_is_shown_and_nothing_is_fetched"
    ),
    "PyTorch's files as they are": f"{RUNNER}test_drop_in_run.py::DropInRunTest::test_two_files_of_a_checkout",
    "runs of the warm server after edits": f"{OURS}warm/test_warm_runner.py::WarmRunnerTest::test_edits_and_options",
    "a run that watches files": f"{OURS}warm/test_watching.py::WatchTest::test_saves_and_keys",
    "ranks that are new interpreters": f"{OURS}launch/test_running.py::RunningTest::test_spawned",
    "tests of pytest in ranks": f"{OURS}_pytest_ranks/test_shared_ranks.py::SharedRanksTest::test_outcomes",
    "pytest in the ranks of torchrun": f"{OURS}_pytest_ranks/test_launched.py::LaunchedTest::test_every_outcome",
    "pytest with ranks of its own": (
        f"{OURS}_pytest_ranks/test_standalone.py::StandaloneTest::test_one_ends_and_one_dies"
    ),
    "a script under torchrun": (
        f"{OURS}_testing/bases/test_functions_and_scripts.py::RunScriptTest::test_under_torchrun"
    ),
    "a compiled step": "distributed/_composable/test_replicate_with_compiler.py::ReplicateTest::test_compile_cpu",
    "programs of ranks that part": f"{OURS}_spmd/test_programs_part.py::TestProgramsPart::test_branches",
    "a suite of FSDP and tensor parallel": (
        "distributed/properties/test_fully_shard_tp_integration.py::TestFullyShardTPIntegration::test_fully_shard_tp_collectives"
    ),
}
