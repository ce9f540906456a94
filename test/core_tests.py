"""The mechanisms that can only be seen end to end, each with a test of it that is in `core`, whatever it costs.

Every other test of `core` costs at most 1 second of CPU: see `tiers.py`. A row is the id of one test, below `test/`.
It may be of a class that `slow_tests.py` names as a whole. Tests of one class may share a run: the first of them pays
for it.
"""

from __future__ import annotations

OURS = "torch_testing_ext/"
RUNNER = f"{OURS}runner/"

CORE: dict[str, str] = {
    "a run of run_test.py with all reports": f"{RUNNER}test_project.py::ModelTest::test_exit_code_and_last_line",
    "a run that is interrupted": f"{RUNNER}test_ways_out.py::SignalsTest::test_signals",
    "agents on nodes": f"{RUNNER}test_agent.py::OneRunTest::test_outcomes",
    "a cluster of Ray": f"{RUNNER}test_cluster.py::TestOnRay::test_one_run",
    "an allocation of Slurm": f"{RUNNER}test_slurm.py::InAllocationTest::test_one_run",
    "runs that share devices": f"{RUNNER}test_shared_leases.py::ConcurrentRunsTest::test_waiting_is_shown_and_ends",
    "the page of a run in a browser": (
        f"{RUNNER}test_html_report.py::InABrowserTest::test_everything_is_shown_and_nothing_is_fetched"
    ),
    "PyTorch's files as they are": f"{RUNNER}test_drop_in_run.py::DropInRunTest::test_two_files_of_a_checkout",
    "a program of the warm server": f"{OURS}test_warm.py::RunWarmTest::test_like_a_new_interpreter",
    "runs of the warm server after edits": f"{OURS}warm/test_warm_runner.py::WarmRunnerTest::test_edits_and_options",
    "a run that watches files": f"{OURS}warm/test_watching.py::WatchTest::test_saves_and_keys",
    "ranks that are new interpreters": f"{OURS}launch/test_running.py::RunningTest::test_spawned",
    "a debugger in a rank": f"{OURS}launch/test_breakpoints.py::OnATerminalTest::test_python",
    "tests of pytest in ranks": f"{OURS}_pytest_ranks/test_shared_ranks.py::SharedRanksTest::test_outcomes",
    "pytest in the ranks of torchrun": f"{OURS}_pytest_ranks/test_launched.py::LaunchedTest::test_every_outcome",
    "pytest with ranks of its own": f"{OURS}_pytest_ranks/test_standalone.py::StandaloneTest::test_every_outcome",
    "a script under torchrun": (
        f"{OURS}_testing/bases/test_functions_and_scripts.py::RunScriptTest::test_under_torchrun"
    ),
    "the sanitizer of collectives": f"{OURS}_collectives/test_planted_faults.py::PlantedFaultTest::test_in_a_function",
    "a property that all ranks check": (
        f"{OURS}_hypothesis/test_participants.py::TestDrawing::test_example_runs_in_all_ranks"
    ),
    "a failure of ranks that shrinks": (
        f"{OURS}_hypothesis/test_participants.py::TestShrinking::test_failure_between_draws"
    ),
    "a compiled step": "distributed/_composable/test_replicate_with_compiler.py::ReplicateTest::test_compile_cpu",
    "programs of ranks that part": f"{OURS}_spmd/test_programs_part.py::TestProgramsPart::test_branches",
    "a suite of FSDP and tensor parallel": (
        "distributed/fsdp/test_fully_shard_tp_integration.py::TestFullyShardTPIntegration::test_fully_shard_tp_collectives"
    ),
    "the checks on a GPU": f"{OURS}gpu/test_gpu_run.py::MadeUpChecksTest::test_every_kind_of_end",
    "the wheel": f"{OURS}test_packaging.py::PackageTest::test_the_wheel_holds_the_package_and_nothing_else",
    "the examples": f"{OURS}test_examples.py::ExamplesTest::test_all_pass",
}
