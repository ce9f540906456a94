"""Tests that docs/contribute/coverage.md is up to date, and that the names that tests commonly use are present."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from kit.checkout import ROOT, CheckoutCase

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.upstream.mapping import installed_torch

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "tools"))
import kit_coverage as coverage  # noqa: E402
import kit_names  # noqa: E402
import refused_names  # noqa: E402


def output_of(*words: object, code: int = 0) -> tuple[str, str]:
    """The stdout and stderr of the command, which has to exit with this code."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        exit_code = coverage.main([str(word) for word in words])
    assert exit_code == code, f"exit code {exit_code}: {out.getvalue()}{err.getvalue()}"
    return out.getvalue(), err.getvalue()


# In these modules every name is present or refused for a reason.
COMPLETE = [
    "common_cuda",
    "common_device_type",
    "common_dist_composable",
    "common_distributed",
    "common_fsdp",
    "common_utils",
    "distributed._shard.sharded_tensor",
    "distributed._tensor.common_dtensor",
    "distributed.checkpoint_utils",
    "distributed.common_state_dict",
    "distributed.distributed_utils",
    "distributed.fake_pg",
    "distributed.multi_threaded_pg",
    "two_tensor",
]

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
    def recorded(self, theirs: str) -> coverage.ModuleCoverage:
        measured = coverage.measure(kit_names.recorded())
        return next(one for one in measured if one.theirs == f"torch.testing._internal.{theirs}")

    def test_the_page_is_up_to_date(self) -> None:
        kits = kit_names.recorded()
        outdated = coverage.is_outdated(coverage.measure(kits), kit_names.in_order(kits), DOCS / "contribute")
        self.assertFalse(outdated, f"to update it, run: {coverage.REFRESH}")

    def test_the_record_has_the_names_of_the_installed_torch(self) -> None:
        root = installed_torch()
        kits = kit_names.recorded()
        version = kit_names.version_of(root)
        self.assertIn(version, kits, f"to record it, run: {coverage.PROGRAM} --record")
        self.assertEqual(kits[version], kit_names.read_sources(root))

    def test_every_torch_since_2_11_is_compared(self) -> None:
        self.assertEqual(kit_names.in_order(kit_names.recorded())[:5], ["2.11", "2.12", "2.13", "2.14", "2.15"])

    @parametrize("module", list(COMMON))
    def test_common_names_are_present(self, module: str) -> None:
        measured = self.recorded(module)
        wanted = set(COMMON[module].split())
        self.assertEqual(sorted(wanted & {*measured.lacking, *measured.refused}), [])
        self.assertGreater(len(wanted & {*measured.here}), 0.9 * len(wanted), "are these really names of PyTorch's?")

    @parametrize("module", COMPLETE)
    def test_nothing_is_missing(self, module: str) -> None:
        self.assertEqual(self.recorded(module).lacking, [])

    def test_no_module_is_incomplete_without_being_listed_here(self) -> None:
        measured = coverage.measure(kit_names.recorded())
        short = {one.theirs.removeprefix("torch.testing._internal.") for one in measured if not one.lacking}
        self.assertEqual(sorted(short), sorted(COMPLETE))

    def test_a_present_name_is_not_refused(self) -> None:
        for one in coverage.measure(kit_names.recorded()):
            self.assertEqual([name for name in one.here if refused_names.reason_of(name)], [])
        twice = [name for refused in refused_names.REFUSED.values() for name in refused]
        self.assertEqual(len(twice), len(set(twice)))

    def test_a_refused_name_exists(self) -> None:
        known = {name for kit in kit_names.recorded().values() for names in kit.values() for name in names}
        self.assertEqual(sorted({name for refused in refused_names.REFUSED.values() for name in refused} - known), [])

    def test_versions_side_by_side(self) -> None:
        module = "torch.testing._internal.common_fsdp"
        kits = {
            "2.10": {module: frozenset({"FSDPTest", "unheard_of"})},
            "2.9": {module: frozenset({"FSDPTest", "MLP", "T"})},
        }
        (measured,) = coverage.measure(kits)
        self.assertEqual(measured.here, ["FSDPTest", "MLP"])
        self.assertEqual(measured.versions, {"MLP": ["2.9"], "T": ["2.9"], "unheard_of": ["2.10"]})
        self.assertEqual(measured.counts("2.9"), (2, 0, 1))
        self.assertEqual(measured.counts("2.10"), (1, 1, 0))
        table = coverage.as_table([measured], kit_names.in_order(kits))
        self.assertRegex(table, r"\| torch 2\.9 +\| torch 2\.10 +\|")
        self.assertRegex(table, r"\| common_fsdp +\| 2 / 0 / 1 +\| 1 / 1 / 0 +\|")
        self.assertIn("Missing: `unheard_of` (2.10)", coverage.as_page([measured], kit_names.in_order(kits)))

    def test_a_record_is_read_as_it_was_written(self) -> None:
        kits = kit_names.recorded()
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "names.json")
            file.write_text('{"torch": [], "modules": {}}')
            for version in reversed(kit_names.in_order(kits)):
                kit_names.record({version: kits[version]}, file)
            self.assertEqual(kit_names.recorded(file), kits)
            again = file.read_text()
            kit_names.record({"2.13": kits["2.13"]}, file)
            self.assertEqual(file.read_text(), again)
            self.assertEqual(again, kit_names.RECORD.read_text())

    def test_an_edited_page_is_outdated(self) -> None:
        measured = [coverage.ModuleCoverage("m", "o", here=["a"], lacking=["b"], refused={"c": "why"})]
        with tempfile.TemporaryDirectory() as directory:
            docs = Path(directory)
            (docs / coverage.PAGE).write_text(coverage.as_page(measured, ["2.1"]))
            self.assertFalse(coverage.is_outdated(measured, ["2.1"], docs))
            self.assertTrue(coverage.is_outdated(measured, ["2.1", "2.2"], docs))
            (docs / coverage.PAGE).write_text("edited")
            self.assertTrue(coverage.is_outdated(measured, ["2.1"], docs))

    def test_the_command(self) -> None:
        data = json.loads(output_of("--json")[0])
        self.assertEqual(data["torch"][:5], ["2.11", "2.12", "2.13", "2.14", "2.15"])
        utils = data["modules"]["torch.testing._internal.common_utils"]
        self.assertIn("TestCase", utils["here"])
        self.assertIn("TestGradients", utils["refused"])
        self.assertEqual(utils["versions"]["requires_multigpu"], ["2.15"])
        self.assertRegex(output_of()[0], r"\| common_utils +(\| \d+ / \d+ / \d+ +){5}\|")


class CheckoutCoverageTest(CheckoutCase):
    def test_a_checkout(self) -> None:
        self.put(self.pytorch / "version.txt", "2.20.0a0\n")
        fsdp = self.pytorch / "torch/testing/_internal/common_fsdp.py"
        imports = "import os\nfrom torch.testing._internal.common_utils import run_tests\n"
        fsdp.write_text(f"{imports}_x = FSDPTest = unheard_of = T = 1\n")
        out, _ = output_of("--pytorch", self.pytorch, "--json")
        data = json.loads(out)
        self.assertEqual(data["torch"], ["2.20"])
        module = data["modules"]["torch.testing._internal.common_fsdp"]
        self.assertEqual(module["here"], ["FSDPTest"])
        self.assertEqual(module["lacking"], ["run_tests", "unheard_of"])
        self.assertEqual(list(module["refused"]), ["T"])

    def test_an_installed_torch_beside_a_checkout(self) -> None:
        self.put(self.pytorch / "version.txt", "2.20.0a0\n")
        installed = self.ours / "site-packages"
        self.put(installed / "torch/version.py", "__all__ = ['__version__']\n__version__ = '2.8.1+cpu'\n")
        self.put(installed / "torch/testing/_internal/two_tensor.py", "class TwoTensor: ...\n")
        out, _ = output_of("--pytorch", self.pytorch, "--pytorch", installed, "--json")
        data = json.loads(out)
        self.assertEqual(data["torch"], ["2.8", "2.20"])
        self.assertEqual(data["modules"]["torch.testing._internal.two_tensor"]["versions"]["TwoTensor"], ["2.8"])

    def test_not_a_checkout(self) -> None:
        _, complaints = output_of("--pytorch", self.ours, code=2)
        self.assertIn("does not say which version of torch it is", complaints)
        self.put(self.ours / "version.txt", "2.20")
        _, complaints = output_of("--pytorch", self.ours, code=2)
        self.assertIn("is not a PyTorch checkout", complaints)


if __name__ == "__main__":
    run_tests()
