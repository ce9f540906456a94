"""The slow tier: tests that cost much and test something coarse, with the reason for each.

The command `slow` of CONTRIBUTING.md runs only them. `tiers.py` has the rules of the three tiers. A row is a pattern
of `fnmatch` for the ids of tests, below `test/`.

What a change can break in a subtle way stays in `core` or `full`: a test that is not coarse comes here only if a
cheaper test of the same code stays there, which the reason names.
"""

from __future__ import annotations

import functools
import re
from fnmatch import translate

OURS = "torch_testing_ext/"
COMPILED = "distributed/_composable/test_replicate_with_compiler.py::"

SLOW = {
    "compiled suites; test_compile_cpu stays": (
        *(
            f"{COMPILED}ReplicateTest::test_compile_{name}_on_cpu"
            for name in ("gpu", "gpu_ac", "bf16", "fp16", "backward_only")
        ),
        f"{COMPILED}ReplicateTest::test_compile_cpu_no_sync",
        f"{COMPILED}ReplicateTest::test_bucketing_*",
        f"{COMPILED}DDP_TP_Test::*",
        f"{OURS}faults/test_replicate_suite_catches_faults.py::*",
        f"{OURS}_spmd/test_regions.py::*trains_as_ddp*",
        f"{OURS}_collectives/test_*.py::SoundProgramsTest::test_*_compiled",
    ),
    "the examples of properties: run_test.py runs them as the README's main command does": (
        "distributed/properties/*_properties.py::*",
        f"{OURS}faults/test_property_suites_catch_faults.py::*",
    ),
    "a hundred edits, each followed by a warm and a cold run; test_each_kind_of_edit stays": (
        f"{OURS}warm/test_warm_is_never_stale.py::NeverStaleTest::test_random_edits",
    ),
    "whole worlds against ranks that communicate, many programs; RandomProgramsTest has one of each kind": (
        f"{OURS}_testing/bases/test_worlds_and_reality.py::ManyRandomProgramsTest::*",
        f"{OURS}_testing/bases/test_worlds_and_reality.py::SuitesTest::*",
    ),
    "sound programs on 64 ranks; SoundTest has them on 8": (
        f"{OURS}_testing/bases/test_whole_worlds.py::LargeSoundTest::*",
    ),
    "a comparison with recorded outcomes, or with PyTorch's kit on whole suites": (
        f"{OURS}conformance/test_conformance.py::ConformanceTest::test_ours_against_recorded_outcomes",
        f"{OURS}upstream/test_drop_in_outcomes.py::*",
        f"{OURS}upstream/test_moving.py::*",
        f"{OURS}_testing/helpers/test_like_pytorch.py::*_periodic",
        f"{OURS}_testing/helpers/test_like_pytorch.py::*_in_ci",
    ),
    "hundreds of runs, one after the other": (
        f"{OURS}launch/test_soak.py::*",
        f"{OURS}_machine/test_first_use.py::*::test_importing_every_module_and_suite",
        f"{OURS}runner/test_shared_leases.py::*::test_many_runs_that_need_several_devices",
        f"{OURS}runner/test_preloaded_server_dies.py::*::test_more_often_than_once_for_each_of_many_tests",
    ),
    "an editor, whose debugger follows every process; test_breakpoints.py stays": (
        f"{OURS}launch/test_editors.py::EditorTest::test_breakpoints",
    ),
    "a whole product; test_same_outcome_for_values_of_every_kind stays": (
        f"{OURS}_testing/helpers/test_assert_equal.py::*::test_same_outcome_for_every_pair_of_values",
    ),
    "installs another Hypothesis from an index; the same test without the generator stays": (
        f"{OURS}_hypothesis/test_replay.py::*::test_another_version_of_hypothesis_with_network",
    ),
    "new interpreters, or a call that does not end; the other programs and pages stay": (
        f"{OURS}test_issue_drafts.py::*::test_program_about_the_kit*",
        f"{OURS}test_found.py::*_endless_search_for_attention",
        f"{OURS}test_found.py::*::test_gloo_abort_at_exit_runs",
    ),
    "a cluster of Ray": (
        f"{OURS}runner/test_cluster.py::TestOnRay::*",
        f"{OURS}runner/test_cluster_kills.py::TestKills::*",
    ),
    "a compiler, which builds the fake accelerator, and training on it; test_building.py stays": (
        f"{OURS}_machine/fake_accelerator/test_device.py::*",
    ),
    "daemons of Slurm": (f"{OURS}runner/test_slurm.py::*Allocation*::*",),
    "end to end on ranks, one row of a table each; of the two styles, `replicate` stays": (
        f"{OURS}_spmd/test_*.py::*fully_shard*",
        f"{OURS}_spmd/test_programs_part.py::*_normed*",
        f"{OURS}_spmd/test_*.py::*OnFourRanks::*",
        f"{OURS}_spmd/test_*.py::*OfFour::*",
        f"{OURS}_spmd/test_equality.py::*::test_optimizer_*",
        f"{OURS}_spmd/test_graph.py::*::test_the_program_chooses_its_buckets",
        f"{OURS}_spmd/test_graph.py::*::test_large_gradients_are_written_to_their_bucket",
        f"{OURS}_spmd/test_spmd_docs.py::*::test_example_under_torchrun",
    ),
    "launchers and plugins of others, all at once; the tests of one launcher and of one plugin each stay": (
        f"{OURS}_pytest_ranks/test_launched.py::*::test_like_mpirun_and_srun",
        f"{OURS}_pytest_ranks/test_launched.py::*::test_a_rank_of_another_agent_dies",
        f"{OURS}_pytest_ranks/test_launched.py::*::test_every_outcome_in_ranks_of_two_agents",
        f"{OURS}_pytest_ranks/test_with_plugins.py::*::test_all_in_one_process",
        f"{OURS}_pytest_ranks/test_with_plugins.py::*::test_all_under_xdist",
        f"{OURS}_pytest_ranks/test_standalone.py::*::test_isolated_ranks",
    ),
    "the examples of all pages, each as a program": (f"{OURS}test_docs.py::DocsTest::test_examples_run",),
    "collects all tests": (f"{OURS}test_slow_tests.py::SlowTestsTest::test_each_row_matches_a_test",),
    "a search": (f"{OURS}_hypothesis/test_given.py::*::test_options_for_a_search",),
    "failures of 8 and 32 ranks; test_four_ranks stays": (f"{OURS}runner/test_one_screen.py::ManyRanksTest::*",),
}


@functools.cache
def _patterns() -> list[re.Pattern[str]]:
    return [re.compile(translate(row)) for rows in SLOW.values() for row in rows]


def is_slow(nodeid: str) -> bool:
    """Whether a test is in the slow tier. `nodeid`: its id, from the root of the checkout."""
    return any(pattern.match(nodeid.removeprefix("test/")) for pattern in _patterns())
