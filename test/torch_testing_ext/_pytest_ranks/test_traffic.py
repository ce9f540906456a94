"""Budgets of communication: planted faults are told by group, operation, count and line; sound steps keep theirs."""

import tempfile

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = subject(__file__, "traffic_of_steps.py")
# By the name of a test: what is said of its fault.
FAULTS = {
    "no_sync_forgotten": r"world +all_reduce +2 calls, budget 1 \(\+1\)",
    "buffers_broadcast": r"world +broadcast +\d+ calls?, budget 0",
    "world_in_place_of_dp": r"dp +all_reduce +0 calls, budget 1 \(-1\)",
    "gather_per_chunk": r"world +all_gather +4 calls, budget 1 \(\+3\)",
    "objects_in_the_loop": r"world +all_gather +2 calls, budget 0 \(\+2\)",
    "barrier_in_the_loop": r"world +barrier +1 call, budget 0 \(\+1\)",
    "gradients_in_float32": r"world +all_reduce +128 bytes, budget 64 \(\+64\)",
    "norm_per_parameter": r"world +all_reduce +5 calls, budget 1 \(\+4\)",
    "replicated_and_back": r"world +all_gather\w* +1 call, budget 0",
    "gathered_again_at_recomputation": r"world +all_gather\w* +\d+ calls, budget \d+ \(\+\d",
    "padded_all_to_all": r"world +all_to_all_single +256 bytes, budget (32|64)",
    "break_of_the_graph": r"world +all_reduce +2 calls, budget 1",
    "item_each_step": r"1 by item\(\) at ",
    "gathered_between_nodes": r"all_gather at ",
}


@pytest.mark.slow
class BudgetsTest(PytestCase):
    def test_planted_faults_and_sound_steps(self):
        with tempfile.TemporaryDirectory() as folder:
            names = [f"test_{name}" for name in FAULTS]
            written = run_pytest({"test_x.py": SUBJECT}, "--update-budgets", folder=folder)
            self.assertOutcomes(written, dict.fromkeys(names, "passed"))
            kept = run_pytest({"test_x.py": SUBJECT}, folder=folder)
            self.assertOutcomes(kept, dict.fromkeys(names, "passed"))
            broken = run_pytest({"test_x.py": SUBJECT}, folder=folder, PLANTED="1")
            self.assertOutcomes(broken, dict.fromkeys(names, "failed"))
            for name, said in FAULTS.items():
                message = broken.messages[f"test_{name}"]
                self.assertRegex(message, said, name)
                self.assertIn("test_x.py:", message, name)
                self.assertLess(message.count("\n"), 50, name)


BAD = """
import pytest
import torch
import torch.distributed as dist
from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.traffic import TrafficError

@pytest.mark.world_size(1)
def test_asked_in_the_block(dist_env, traffic):
    with traffic() as seen, pytest.raises(TrafficError, match="has not ended"):
        seen.calls()

@pytest.mark.world_size(1)
def test_nested(dist_env, traffic):
    with traffic() as seen:
        with pytest.raises(TrafficError, match="cannot be nested"), traffic():
            pass
        dist.barrier()
    assert seen.calls() == 1

@pytest.mark.world_size(1)
def test_budgets(dist_env, traffic, tmp_path):
    with traffic() as seen:
        dist.all_reduce(torch.ones(2))
    with pytest.raises(ValueError, match="no group 'tp'; it is in the default group"):
        seen.calls("tp")
    file = tmp_path / "step.toml"
    with pytest.raises(ValueError, match="write it with --update-budgets"):
        seen.within(file)
    file.write_text("torch = ")
    with pytest.raises(ValueError, match="cannot be read"):
        seen.within(file)
    content = 'torch = "2.0"\\nworld_size = {size}\\n[[class]]\\nranks = [0]\\n'
    content += '[[class.issued]]\\ngroup = "world"\\nop = "all_reduce"\\ncalls = {calls}\\nbytes = 8\\n'
    file.write_text(content.format(size=2, calls=1))
    with pytest.raises(ValueError, match="one of 2 ranks, and this world has 1"):
        seen.within(file)
    file.write_text(content.format(size=1, calls=2))
    with pytest.raises(AssertionError, match="made with torch 2.0"):
        seen.within(file)
    file.write_text(content.format(size=1, calls=1))
    seen.within(file)
    with traffic() as nothing:
        pass
    with pytest.raises(ValueError, match="issues nothing"):
        nothing.within(file)

class ThreadsTest(MultiThreadedTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_threads()
    def test_threads(self):
        with self.assertRaisesRegex(TrafficError, "threads share"):
            self.traffic()
"""


class InputTest(PytestCase):
    def test_bad_input(self):
        run = run_pytest({"test_x.py": BAD})
        names = ("test_asked_in_the_block", "test_nested", "test_budgets", "ThreadsTest.test_threads")
        self.assertOutcomes(run, dict.fromkeys(names, "passed"))


if __name__ == "__main__":
    run_tests()
