"""Bugs that we found in torch, kept in docs/found: they still exist.

If torch has fixed one, add the version here, and make the exceptions for it in the suites end there. In a version that
we know, its test fails until then; in a newer one, which we have not looked at yet, a warning says so.
"""

import re
import runpy
import sys
from pathlib import Path

import torch

from torch_testing_ext._torch.known_versions import ALL, repaired
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

FOUND = Path(__file__).parents[2] / "docs" / "found"
sys.path.append(str(Path(__file__).parents[1] / "distributed" / "tensor"))  # for the tables of its suites
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
    "fft_of_a_rank_without_rows": (2, 15),
    "fill_of_a_partial_sum": None,
    "flatten_of_a_dim_sharded_twice": None,
    "gloo_second_wait": None,
    "gloo_split_of_a_second_group": (2, 14),
    "item_of_a_partial_sum": None,
    "item_of_a_rank_without_elements": None,
    "local_synchronization_and_group_names": None,
    "mse_loss_of_uneven_shards": None,
    "pipeline_eval_of_v_schedules": None,
    "pipeline_gradient_of_a_view": None,
    "pipeline_split_backward_of_frozen_inputs": None,
    "pipeline_split_backward_of_shared_weights": None,
    "zero_join_alone": None,
}
# The first version that is wrong, where an earlier one, which we support, is right.
WRONG_SINCE = {
    "cross_product_of_broadcast_rows": (2, 14),
    "fft_of_a_rank_without_rows": (2, 12),
    "local_synchronization_and_group_names": (2, 14),
    "pipeline_gradient_of_a_view": (2, 12),
    "pipeline_split_backward_of_frozen_inputs": (2, 12),
}
# Before this version, the file ends with an error of torch.
RAISED_BEFORE = {
    "argmax_of_columns": (2, 12),
    "convolution_of_sharded_weights": (2, 12),
    "pipeline_split_backward_of_frozen_inputs": (2, 13),
}
# A bug that shows only in some runs, or only in how long a call takes, cannot be an expected failure.
NOT_RUN = {"endless_search_for_attention", "gloo_abort_at_exit"}


# Drafts of issues. Each has a short program that ends with an assertion, which fails where torch is wrong.
DRAFTS = sorted(file.stem for file in (FOUND / "issues").glob("*.md"))
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FIXED = [
    name
    for name, version in FIXED_IN.items()
    if (version and torch.__version__ >= version) or torch.__version__ < WRONG_SINCE.get(name, (0, 0))
]


class TestFound(MultiProcessTestCase):
    """Each file runs in a rank that has imported torch already, and forks the other ranks that it needs."""

    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_every_file_is_listed(self):
        self.assertEqual({file.stem for file in FOUND.glob("*.py")} - NOT_RUN, set(FIXED_IN))

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

    @parametrize("name", DRAFTS)
    def test_program_of_the_draft(self, name):
        [program] = PROGRAM.findall((FOUND / "issues" / f"{name}.md").read_text(encoding="utf-8"))
        self.assertLessEqual(len(program.splitlines()), 15)
        try:
            exec(program, {"__name__": "program"})
            is_right = True
        except AssertionError:
            is_right = False
        if name in FIXED:
            self.assertTrue(is_right, "torch is still wrong")
        elif is_right:
            repaired(f"has not the bug of docs/found/issues/{name}.md")

    def is_right(self, name):
        """Run a file as a program: its exit code tells whether torch is right."""
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
