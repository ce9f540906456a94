"""Budgets of communication: planted faults are told by group, operation, count and line; sound steps keep theirs."""

import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest
from kit.runs import RUN_TEST, run_test

from torch_testing_ext._collectives.records.budgets import Budget
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
    "waited_at_once": r"0\.0 \(1 without: all_reduce at ",
    "functional_waited_at_once": r"0\.0 \(1 without: all_reduce at ",
    "buckets_in_one": r"0\.0 \(1 without: all_reduce at ",
    "prefetch_lost": r"\d without: all_gather_into_tensor at ",
    "not_resharded": r"\d+ < 133120",
    "activations_kept": r"\d+ < 500000",
    "synchronized_each_step": r"1 by synchronize\(\) at ",
    "microbatch_sent_twice": r"world +(send|recv) +4 calls, budget 2",
    "tied_weight_twice": r"world +all_reduce +2 calls, budget 1 \(\+1\); 512 bytes",
    "small_buckets": r"world +all_reduce +[2-8] calls, budget 1 \(\+[1-7]\)",
    "bytes_grow_over_steps": r"world +all_reduce +48 bytes, budget 16 \(\+32\)",
    "memory_kept_over_steps": r"\d+ < 393216",
    "host_waits_in_a_loop": r"4 by __float__\(\) at ",
    "whole_tensor_in_the_loss": r"world +all_gather\w* +1 call, budget 0",
    "gathers_in_a_layer": r"all_gather +4 calls, budget 1 \(\+3\)\n +4 at test_x\.py:\d+ in forward, in mlp\.up ",
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


SOUND = subject(__file__, "sound_traffic.py")


@pytest.mark.nightly
class SoundStepsTest(PytestCase):
    """Steps in which nothing is wrong are counted as torch's profiler counts them, and keep the budgets they wrote."""

    def assertSilent(self, number, *options):
        with tempfile.TemporaryDirectory() as folder:
            for update in (("--update-budgets",), ()):
                run = run_pytest({"test_x.py": SOUND}, *options, *update, folder=folder)
                self.assertEqual({*run.outcomes.values()}, {"passed"}, run.text)
                self.assertEqual(len(run.outcomes), number)

    def test_steps(self):
        self.assertSilent(27, "-k", "not devices")

    def test_steps_on_devices(self):
        self.assertSilent(1, "--fake-accelerators", "2", "-k", "devices")


FILES = subject(__file__, "budgets_of_tests.py")


@pytest.mark.slow
class FilesTest(PytestCase):
    """Budgets that runs write and read: of several processes, other worlds, and ranks that do not come so far."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.budgets = self.folder / "budgets"

    def run_files(self, *options, **more):
        return run_pytest({"test_x.py": FILES}, *options, folder=str(self.folder), **more)

    def assertAll(self, run, outcome):
        self.assertTrue(run.outcomes, run.text)
        self.assertEqual({*run.outcomes.values()}, {outcome}, run.text)

    def test_two_workers(self):
        pytest.importorskip("xdist", reason="pytest-xdist is not installed")
        written = self.run_files("--update-budgets", "-p", "xdist", "-n", "2")
        differing = [message for message in written.messages.values() if "other traffic" in message]
        self.assertEqual(len(differing), 1, written.text)
        said = r"budgets/differing\.toml has other traffic, of test_x\.py::test_differing\[[12]\]: name a file for each"
        self.assertRegex(differing[0], said)
        self.assertEqual([*written.outcomes.values()].count("failed"), 1, written.text)
        files = sorted(self.budgets.iterdir())
        self.assertEqual(len(files), 10, files)
        for file in files:
            self.assertEqual(({*Budget.read(file).of_ranks}, Budget.read(file).world_size), ({0, 1}, 2), file)
        kept = self.run_files("-k", "not varying")
        self.assertEqual([*kept.outcomes.values()].count("failed"), 1, kept.text)
        self.assertRegex("".join(kept.messages.values()), "budgets/differing.toml is not kept")

    def test_a_test_that_varies(self):
        """A repetition by torchtest fails if its traffic differs from that of the first."""
        (self.folder / "run_test.py").write_text(RUN_TEST.format(before=""))
        (self.folder / "test_x.py").write_text(FILES)
        for chosen, code in (("test_x.py::test_varying", 1), ("test_x.py::test_grows", 0)):
            run = run_test(self.folder, "--update-budgets", "--repeat", "2", chosen)
            self.assertEqual(run.code, code, run.console)
            said = "budgets/varying.toml has other traffic, of this test before"
            self.assertEqual(said in run.console, bool(code), run.console)

    def test_other_worlds(self):
        chosen = ("-k", "plain or shared")
        self.assertAll(self.run_files("--update-budgets", *chosen), "passed")
        before = {file: file.read_bytes() for file in self.budgets.iterdir()}
        simulated = self.run_files("--simulate", "4", *chosen)
        self.assertAll(simulated, "passed")
        self.assertIn("not compared: budgets/shared.toml is the budget of 2 ranks", simulated.text)
        other = self.run_files("-o", "dist_world_size=4", *chosen)
        self.assertAll(other, "failed")
        self.assertIn("budgets/shared.toml: the budget is one of 2 ranks, and this world has 4", other.text)
        self.assertIn("name a file for each world size", other.text)
        refused = self.run_files("--simulate", "4", "--update-budgets")
        self.assertEqual(refused.code, 4)
        self.assertIn("a budget is that of the ranks which its test has", refused.errors)
        self.assertEqual({file: file.read_bytes() for file in self.budgets.iterdir()}, before)

    def test_ranks_that_do_not_come_so_far(self):
        for leaves in ("skips", "dies"):
            with self.subTest(leaves):
                self.run_files("--update-budgets", "-k", "leaves", LEAVES=leaves)
                self.assertEqual({*Budget.read(self.budgets / "leaves.toml").of_ranks}, {0})
                run = self.run_files("-k", "leaves")
                self.assertOutcomes(run, {"test_leaves": "failed"})
                said = "budgets/leaves.toml: the budget has no class with rank 1: write it again with --update-budgets"
                self.assertIn(said, run.messages["test_leaves"])


BAD = subject(__file__, "bad_traffic.py")


class InputTest(PytestCase):
    def test_bad_input(self):
        run = run_pytest({"test_x.py": BAD})
        names = ["test_asked_in_the_block", "test_nested", "test_budgets", "ThreadsTest.test_threads"]
        names += [f"test_unfinished[{reduce}]" for reduce in ("all_reduce", "functional_all_reduce")]
        self.assertOutcomes(run, dict.fromkeys(names, "passed"))


if __name__ == "__main__":
    run_tests()
