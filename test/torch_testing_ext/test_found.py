"""Bugs that we found in torch, kept in docs/found: they still exist.

If torch has fixed one, add the version here, and make the exceptions for it in the suites end there. In a version that
we know, its test fails until then; in a newer one, which we have not looked at yet, a warning says so.
"""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from kit.ranks import OneRank

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests, timeout

FOUND = Path(__file__).parents[2] / "docs" / "found"
sys.path.append(str(Path(__file__).parents[1] / "distributed" / "tensor"))  # for the tables of its suites
from known_versions import ALL, repaired  # noqa: E402

# The first version of torch that is right; None if no version is.
FIXED_IN = {
    "amax_of_a_rank_without_elements": None,
    "argmax_of_columns": None,
    "compiled_random_values_twice": (2, 14),
    "compiled_read_of_a_missing_attribute": None,
    "compiled_write_to_a_float64_scalar": (2, 14),
    "convolution_of_sharded_weights": None,
    "cross_product_of_broadcast_rows": None,
    "cumsum_of_a_sharded_dim": (2, 14),
    "embedding_rank_without_rows": None,
    "endless_search_for_attention": None,
    "fft_of_a_rank_without_rows": (2, 15),
    "fill_of_a_partial_sum": None,
    "flatten_of_a_dim_sharded_twice": None,
    "gloo_second_wait": None,
    "gloo_split_of_a_second_group": (2, 14),
    "item_of_a_partial_sum": None,
    "item_of_a_rank_without_elements": None,
    "local_synchronization_and_group_names": None,
    "mse_loss_of_uneven_shards": None,
    "permute_by_group_name": None,
    "pipeline_eval_of_v_schedules": None,
    "pipeline_gradient_of_a_view": None,
    "pipeline_split_backward_of_frozen_inputs": None,
    "pipeline_split_backward_of_shared_weights": None,
    "zero_join_alone": None,
}
# The first version that is wrong, where an earlier one, which we support, is right.
WRONG_SINCE = {
    "cross_product_of_broadcast_rows": (2, 14),
    "endless_search_for_attention": (2, 13),
    "fft_of_a_rank_without_rows": (2, 12),
    "local_synchronization_and_group_names": (2, 14),
    "pipeline_gradient_of_a_view": (2, 12),
    "pipeline_split_backward_of_frozen_inputs": (2, 12),
}
# Before this version, the file ends with an error of torch.
RAISED_BEFORE = {
    "argmax_of_columns": (2, 12),
    "convolution_of_sharded_weights": (2, 12),
    "pipeline_eval_of_v_schedules": (2, 12),
    "pipeline_split_backward_of_frozen_inputs": (2, 13),
}
# This one ends its process.
ALONE = {"endless_search_for_attention"}
# A bug that shows only in some runs cannot be an expected failure.
NOT_JUDGED = {"gloo_abort_at_exit"}

FIXED = [
    name
    for name, version in FIXED_IN.items()
    if (version and torch.__version__ >= version) or torch.__version__ < WRONG_SINCE.get(name, (0, 0))
]


def imports_of(source):
    """The packages that a program imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


class TestFound(OneRank):
    """Each file runs in a rank that has imported torch already, and forks the other ranks that it needs."""

    def test_every_file_is_listed(self):
        self.assertEqual({file.stem for file in FOUND.glob("*.py")} - NOT_JUDGED, set(FIXED_IN))

    def test_every_file_needs_torch_alone(self):
        for file in FOUND.glob("*.py"):
            with self.subTest(file.name):
                self.assertLessEqual(imports_of(file.read_text(encoding="utf-8")) - sys.stdlib_module_names, {"torch"})

    def test_suites_leave_a_fault_out_in_its_versions(self):
        """The tables of the suites have the versions of the pages."""
        from dtensor_opinfo_support import KNOWN_FAULTS
        from dtensor_ops_support import WRONG

        for entry in (*KNOWN_FAULTS, *WRONG):
            page = getattr(entry, "page", None) or entry.message
            since, until = entry.versions
            with self.subTest(page):
                self.assertEqual(None if until == ALL[1] else until, FIXED_IN[page])
                self.assertEqual(None if since == ALL[0] else since, WRONG_SINCE.get(page))

    @parametrize("name", sorted(set(FIXED_IN) - set(FIXED)))
    def test_is_wrong(self, name):
        if self.is_right(name):
            repaired(f"has not the bug of docs/found/{name}.py: list it in FIXED_IN")

    @parametrize("name", sorted(FIXED))
    def test_is_fixed(self, name):
        self.assertTrue(self.is_right(name), "torch is still wrong")

    @timeout(300)
    def test_gloo_abort_at_exit_runs(self):
        command = [sys.executable, FOUND / "gloo_abort_at_exit.py", "1"]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=280).stdout
        self.assertRegex(output, r"pause of 0 s: [01] of 1 aborted\npause of 0.002 s: [01] of 1 aborted\n")

    def is_right(self, name):
        """Run a file as a program: its exit code tells whether torch is right."""
        if name in ALONE:
            return subprocess.run([sys.executable, FOUND / f"{name}.py"], timeout=280).returncode == 0
        try:
            runpy.run_path(str(FOUND / f"{name}.py"), run_name="__main__")
        except SystemExit as exit_request:
            return not exit_request.code
        except RuntimeError:
            if torch.__version__ >= RAISED_BEFORE.get(name, (0, 0)):
                raise
            return False
        return True


instantiate_parametrized_tests(TestFound)

if __name__ == "__main__":
    run_tests()
