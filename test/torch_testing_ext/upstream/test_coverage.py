"""Tests that the coverage pages are up to date, and that the names that tests commonly use are present."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from upstream_support import ROOT, CheckoutCase

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.upstream import coverage, reasons
from torch_testing_ext.upstream.__main__ import main
from torch_testing_ext.upstream.mapping import installed_torch

DOCS = ROOT / "docs"

# In these modules every name is present or refused for a reason.
COMPLETE = ["common_distributed", "common_fsdp", "common_dist_composable", "distributed._tensor.common_dtensor"]

# The names that the contract of the mirror lists, and those that test files elsewhere import.
COMMON = {
    "common_distributed": """
        ACCELERATOR_DIST_BACKENDS DDP_RANK_DEVICES DEFAULT_WORLD_SIZE DistTestCases DistributedTestBase
        DynamoDistributedMultiProcTestCase DynamoDistributedSingleProcTestCase HAS_ACCELERATOR MultiProcessTestCase
        PLATFORM_SUPPORTS_SYMM_MEM SaveForwardInputsModel SaveForwardInputsModule TEST_SKIPS TIMEOUT_DEFAULT
        TIMEOUT_OVERRIDE TestSkip at_least_x_gpu captured_output cleanup_temp_dir create_device create_tcp_store
        evaluate_platform_supports_symm_mem get_required_world_size get_timeout has_efa import_transformers_or_skip
        init_multigpu_helper initialize_temp_directories logger nccl_skip_if_lt_x_gpu require_n_gpus_for_nccl_backend
        requires_accelerator_dist_backend requires_ddp_rank requires_gloo requires_mpi requires_multicast_support
        requires_nccl requires_nccl_shrink requires_nccl_version requires_ucc requires_world_size run_subtests
        simple_sparse_reduce_tests skip_if_lt_x_gpu skip_if_no_gpu skip_if_odd_worldsize skip_if_rocm_arch_multiprocess
        skip_if_rocm_multiprocess skip_if_rocm_ver_lessthan_multiprocess skip_if_small_worldsize skip_if_win32
        sm_is_or_higher_than tmp_dir tp_transports verify_ddp_error_logged with_dist_debug_levels
        with_nccl_blocking_wait
    """,
    "common_fsdp": """
        AlwaysWrapNestedWrappedModule CUDAInitMode DEVICEInitMode DEVICE_COUNT DEVICE_TYPE DISTRIBUTED_BACKEND
        DoubleLinear DummyDDP DummyProcessGroup FSDPInitMode FSDPTest FSDPTestMixin FSDPTestModel MLP MLPStack
        MixtureOfExperts ModuleWithDelay NestedLinear NestedWrappedModule NestedWrappedModuleWithDelay
        NonUniformReqGradNWM SkipModel SkipModule TransformerWithSharedParams check_sharded_parity compiled_fsdp_test
        get_devtype get_full_params patch_all_gather patch_all_reduce patch_foreach_all_gather patch_foreach_reduce
        patch_post_backward patch_reduce_scatter patch_register_post_backward_hook_backward patch_reshard patch_unshard
        reduce_scatter_with_assert run_subtests subtest_name
    """,
    "distributed._tensor.common_dtensor": """
        Attention DEVICE_COUNT DEVICE_TYPE DTensorConverter DTensorTestBase DTensorTestMixin ExpertLayer ExpertParallel
        ExpertParallelWithTP Experts FeedForward LocalDTensorTestBase MLPModule MLPStacked ModelArgs NUM_DEVICES
        PG_BACKEND RMSNormPython TEST_SKIPS TensorParallelForExpert TestFunc Transformer TransformerBlock
        create_local_tensor_test_class generate_shard_orders make_full_tensor make_wrapped map_local_for_rank
        map_local_tensor_for_rank op_strategy_context patched_distribute_tensor redistribute reduce_local_int
        shard_order_to_placement skip_if_lt_x_gpu skip_unless_torch_gpu validate_sharding_rule_sample
        validate_sharding_rule_sample_backward with_comms
    """,
    "distributed.fake_pg": "FakeStore",
    "common_utils": """
        FILE_SCHEMA IS_FBCODE IS_LINUX IS_MACOS IS_WINDOWS IS_X86 DeterministicGuard NoTest SEED TEST_ACL TEST_CUDA
        TEST_HPU TEST_WITH_ASAN TEST_WITH_DEV_DBG_ASAN TEST_XPU TemporaryFileName TestCase check_leaked_tensors
        decorateIf find_free_port instantiate_parametrized_tests parametrize reparametrize retry_on_connect_failures
        run_tests set_rng_seed skipIfRocm skipIfTorchDynamo slowTest subtest
    """,
}


@instantiate_parametrized_tests
class CoverageTest(TestCase):
    def test_the_docs_are_up_to_date(self) -> None:
        root = installed_torch()
        differing = coverage.outdated(coverage.measure(root), coverage.version_of(root), DOCS)
        self.assertEqual(differing, [], f"to update the docs, run: {coverage.REFRESH}")

    @parametrize("module", list(COMMON))
    def test_common_names_are_present(self, module: str) -> None:
        theirs = f"torch.testing._internal.{module}"
        measured = next(one for one in coverage.measure(installed_torch()) if one.theirs == theirs)
        wanted = set(COMMON[module].split())
        self.assertEqual(sorted(wanted & {*measured.lacking, *measured.refused}), [])
        self.assertGreater(len(wanted & {*measured.here}), 0.9 * len(wanted), "are these really names of PyTorch's?")

    @parametrize("module", COMPLETE)
    def test_nothing_is_missing(self, module: str) -> None:
        theirs = f"torch.testing._internal.{module}"
        measured = next(one for one in coverage.measure(installed_torch()) if one.theirs == theirs)
        self.assertEqual(sorted(measured.lacking), [])

    def test_a_present_name_is_not_refused(self) -> None:
        for one in coverage.measure(installed_torch()):
            self.assertEqual({*one.here} & one.refused.keys(), set())
        twice = [name for refused in reasons.REFUSED.values() for name in refused]
        self.assertEqual(len(twice), len(set(twice)))

    def test_another_torch_is_compared_by_the_names_of_both(self) -> None:
        measured = [coverage.ModuleCoverage("m", "o", here=["a", "new"], lacking=["b"], refused={"c": "why"})]
        with tempfile.TemporaryDirectory() as directory:
            docs = Path(directory)
            coverage.write([coverage.ModuleCoverage("m", "o", here=["a", "old"], lacking=["b"])], "2.1", docs)
            self.assertEqual(coverage.outdated(measured, "2.2", docs), [])
            self.assertEqual(len(coverage.outdated(measured, "2.1", docs)), 1)
            coverage.write([coverage.ModuleCoverage("m", "o", here=["b"], lacking=["a"])], "2.1", docs)
            self.assertEqual(
                coverage.outdated(measured, "2.2", docs), ["m.a is here, not lacking", "m.b is lacking, not here"]
            )
            coverage.write(measured, "2.2", docs)
            self.assertEqual(coverage.outdated(measured, "2.2", docs), [])
            (docs / coverage.PAGE).write_text("edited")
            self.assertEqual(len(coverage.outdated(measured, "2.2", docs)), 1)

    def test_the_command(self) -> None:
        def output(*words: str) -> str:
            with redirect_stdout(io.StringIO()) as out:
                self.assertEqual(main(["coverage", *words]), 0)
            return out.getvalue()

        data = json.loads(output("--json"))
        utils = data["modules"]["torch.testing._internal.common_utils"]
        self.assertIn("TestCase", utils["here"])
        self.assertIn("TestGradients", utils["refused"])
        self.assertRegex(output(), rf"\| common_utils +\| {len(utils['here'])} +\|")


class CheckoutCoverageTest(CheckoutCase):
    def test_a_checkout(self) -> None:
        self.put(self.pytorch / "version.txt", "2.20.0a0\n")
        fsdp = self.pytorch / "torch/testing/_internal/common_fsdp.py"
        imports = "import os\nfrom torch.testing._internal.common_utils import run_tests\n"
        fsdp.write_text(f"{imports}_x = FSDPTest = unheard_of = T = 1\n")
        out, _ = self.upstream("coverage", "--pytorch", self.pytorch, "--json")
        data = json.loads(out)
        self.assertEqual(data["torch"], "2.20")
        module = data["modules"]["torch.testing._internal.common_fsdp"]
        self.assertEqual(module["here"], ["FSDPTest"])
        self.assertEqual(module["lacking"], ["run_tests", "unheard_of"])
        self.assertEqual(list(module["refused"]), ["T"])

    def test_not_a_checkout(self) -> None:
        _, complaints = self.upstream("coverage", "--pytorch", self.ours, code=2)
        self.assertIn("is not a PyTorch checkout", complaints)


if __name__ == "__main__":
    run_tests()
