"""Tests in processes that a launcher has started: in place, with one verdict, and never N times N processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.processes import clean_environ
from kit.pytest_runs import RUN_TIMEOUT, PytestCase, PytestRun, run_pytest, run_under_torchrun, run_under_two_agents
from kit.runs import RUN_TEST, run_test
from kit.warm import run_warm

from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext.common_utils import run_tests

pytestmark = pytest.mark.slow

HEAD = """
import os, signal, sys, threading, unittest
import pytest, torch
import torch.distributed as dist
from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcContinuousTest, collectives_may_differ
from torch_testing_ext.ranks import spawn

def rank():
    return int(os.environ["RANK"])

def add_up():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2

def disagree():
    # gloo reduces four bytes of each rank, whatever they mean
    dist.all_reduce(torch.ones(1, dtype=[torch.float32, torch.int32][rank()]))

with open(f"processes{rank() if 'RANK' in os.environ else ''}", "a") as file:
    file.write(f"{os.getpid()}\\n")
"""
SUBJECT = subject(__file__, "under_torchrun.py")
MODEL = {
    "ProcessesTest.test_passes": ("passed", ""),
    "ProcessesTest.test_disagrees": ("failed", "rank 1 calls all_reduce [1] int32 in call #1"),
    "ProcessesTest.test_disagrees_on_purpose": ("passed", ""),
    "ProcessesTest.test_by_env": ("passed", ""),
    "ProcessesTest.test_fails": ("failed", "rank 1 of 2 failed"),
    "ProcessesTest.test_skips": ("skipped", "in all ranks"),
    "ProcessesTest.test_forked_child_runs_on": ("failed", "rank 1 of 2 failed"),
    "ProcessesTest.test_skips_in_one": ("failed", "skipped"),
    "ThreeTest.test_size": ("skipped", "a launcher has started 2 ranks; the test is for 3"),
    "PersistentTest.test_passes": ("passed", ""),
    "PersistentTest.test_fails": ("failed", "rank 1 of 2 failed"),
    "PersistentTest.test_passes_again": ("passed", ""),
    "TestMarked.test_passes": ("passed", ""),
    "TestMarked.test_disagrees": ("failed", "rank 1 calls all_reduce [1] int32 in call #1"),
    "TestMarked.test_disagrees_on_purpose": ("passed", ""),
    "TestMarked.test_by_env": ("passed", ""),
    "TestMarked.test_fails": ("failed", "rank 1 of 2 failed"),
    "TestMarked.test_skips": ("skipped", "in all ranks"),
    "TestMarked.test_skips_in_one": ("failed", "skipped"),
    "TestMarked.test_xfail": ("xfail", ""),
    **{f"TestMarked.test_leaves_when_peers_may_still_connect[{number}]": ("passed", "") for number in range(12)},
    "TestMarked.test_strict_xfail_added_in_the_body": ("failed", "[XPASS(strict)]"),
    "TestMarked.test_depends_on_the_rank[0]": ("failed", "the ranks of the launcher run different tests"),
    "TestMarked.test_after_it": ("passed", ""),
    "TestMarked.test_forked_child_runs_on": ("failed", "rank 1 of 2 failed"),
    "TestMarked.test_exits": ("failed", "SystemExit: 0"),
    "test_sizes[world_size=2]": ("passed", ""),
    "test_sizes[world_size=3]": ("skipped", "a launcher has started 2 ranks; the test is for 3"),
    "test_spawn": ("skipped", "spawn starts ranks of its own"),
    "test_plain": ("passed", ""),
    "test_plain [rank 1]": ("failed", "plain test in rank 1"),
    "test_plain_in_all": ("failed", "plain test in all ranks"),
}


class LaunchedTest(PytestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def run_under_torchrun(self, source: str, *options: str) -> PytestRun:
        return run_under_torchrun(self.folder, source, *options)

    def test_every_outcome(self) -> None:
        run = self.run_under_torchrun(SUBJECT)
        self.assertOutcomes(run, {name: outcome for name, (outcome, _) in MODEL.items()})
        for name, (_, text) in MODEL.items():
            with self.subTest(test=name):
                self.assertIn(text, run.messages[name].partition("\n")[0])
        # The file was imported by the two processes of the launcher and no other.
        self.assertEqual([len(Path(self.folder, f"processes{rank}").read_text().split()) for rank in range(2)], [1, 1])
        self.assertFalse(Path(self.folder, "processes").exists())
        self.assertNotEqual(run.code, 0)
        # Rank 0 reports for all; only what it cannot know comes from rank 1.
        self.assertEqual(run.text.count("test session starts"), 1, run.text)
        self.assertIn("printed in rank 1", run.text)
        self.assertNotIn("pytest in rank 1:\n", run.errors)
        for text in ("plain test in rank 1", "plain test in all ranks"):
            self.assertEqual((run.text + run.errors).count(f"E       AssertionError: {text}\n"), 1, run.errors)

    @pytest.mark.nightly
    def test_every_outcome_in_ranks_of_two_agents(self) -> None:
        """As on two machines: the coordinator listens on TCP, and its address is in the launcher's store."""
        run = run_under_two_agents(self.folder, SUBJECT)
        self.assertOutcomes(run, {name: outcome for name, (outcome, _) in MODEL.items()})
        for name, (_, text) in MODEL.items():
            with self.subTest(test=name):
                self.assertIn(text, run.messages[name].partition("\n")[0])
        self.assertNotIn("pytest in rank", run.errors)

    def test_a_rank_of_another_agent_dies(self) -> None:
        source = """
@pytest.mark.world_size(2)
def test_dies(dist_env):
    if rank():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""
        run = run_under_two_agents(self.folder, HEAD + source)
        self.assertOutcomes(run, {"test_dies": "failed"})
        self.assertIn("rank 1 of 2 was lost", run.messages["test_dies"])

    def test_a_rank_that_dies_is_named_and_the_session_ends(self) -> None:
        source = """
@pytest.mark.world_size(2)
def test_dies(dist_env):
    if rank():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.world_size(2)
def test_after_it(): ...
"""
        run = self.run_under_torchrun(HEAD + source)
        self.assertNotEqual(run.code, 0)
        self.assertEqual(run.outcomes.pop("test_after_it", "failed"), "failed")
        self.assertOutcomes(run, {"test_dies": "failed"})
        self.assertIn("rank 1 of 2 was lost", run.messages["test_dies"])

    def test_a_hang_ends_the_session_and_its_report_has_all(self) -> None:
        """Rank 0 hangs too, here in C: its other threads report the test, with what has passed before it."""
        source = """
@pytest.mark.world_size(2)
def test_passes(dist_env): ...

def test_plain_in_rank_1():
    assert rank() == 0, "plain test in rank 1"

@pytest.mark.world_size(2)
def test_hangs(dist_env):
    print("printed in rank", rank())
    if rank():
        pytest.skip("leaves the others alone")
    os.read(os.pipe()[0], 1)

@pytest.mark.world_size(2)
def test_after_it(): ...
"""
        run = self.run_under_torchrun(HEAD + source)
        self.assertNotEqual(run.code, 0)
        self.assertEqual(run.outcomes.pop("test_plain_in_rank_1 [rank 1]", "failed"), "failed")  # if it comes in time
        passed = dict.fromkeys(("test_passes", "test_plain_in_rank_1"), "passed")
        self.assertOutcomes(run, passed | {"test_hangs": "failed"})
        hangs = "  rank 0  runs, before any collective       test_x.py:"
        self.assertIn(hangs, run.messages["test_hangs"])
        self.assertIn("2 passed", run.text)
        self.assertEqual(run.text.count(hangs), 1, run.text)
        self.assertNotIn(hangs, run.errors)

    def test_whoever_is_left_writes_the_report(self) -> None:
        """Rank 0 is killed, and rank 1 does not return from a test, or does."""
        source = """
@pytest.mark.world_size(2)
def test_passes(dist_env): ...

@pytest.mark.world_size(2)
def test_dies():
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RETURNS"] != "1":
        os.read(os.pipe()[0], 1)
"""
        for returns in ("0", "1"):
            with self.subTest(returns=returns):
                run = run_under_torchrun(self.folder, HEAD + source, RETURNS=returns)
                self.assertNotEqual(run.code, 0)
                self.assertOutcomes(run, {"test_passes": "passed", "test_dies": "failed"})
                self.assertIn("rank 0 of 2 was lost", run.messages["test_dies"])

    def test_one_rank_stops_before_the_others(self) -> None:
        """The other one does not wait for it until its time-out, which is longer than a run may take here."""
        source = """
def test_plain():
    assert rank() == int(os.environ["GOOD"])

@pytest.mark.world_size(2, timeout=1000)
def test_marked(): ...
"""
        for good in ("0", "1"):
            with self.subTest(good=good):
                run = run_under_torchrun(self.folder, HEAD + source, "-x", GOOD=good)
                self.assertEqual(run.code, 1, run.errors)
                self.assertIn("failed", run.outcomes.values())
                if good == "0":
                    self.assertIn("rank 1 of 2 has ended its tests", run.messages["test_marked"])

    def test_like_mpirun_and_srun(self) -> None:
        """Each has variables of its own; the processes have one parent and no rendezvous."""
        source = """
class T(DistributedTestBase):
    world_size = 2
    def test_sum(self):
        self.create_pg("cpu")
        add_up()
    def test_by_env(self):
        dist.init_process_group("gloo")
        add_up()
    def test_fails(self):
        self.assertEqual(self.rank, 0)
"""
        Path(self.folder, "test_x.py").write_text(HEAD + source)
        lease = leased_port()
        port = lease.__enter__()
        self.addCleanup(lease.__exit__, None, None, None)
        variables = (
            lambda rank: {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            lambda rank: {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"},
            # Of a step on two machines, whose user has set where the ranks meet.
            lambda rank: {
                "SLURM_PROCID": rank,
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_LOCALID": "0",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
            },
        )
        for of_rank in variables:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "unittest", "test_x"],
                    cwd=self.folder,
                    env=clean_environ(**of_rank(str(rank))),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(2)
            ]
            texts = [process.communicate(timeout=RUN_TIMEOUT)[1] for process in processes]
            self.assertEqual([process.returncode for process in processes], [1, 1], texts)
            for text in texts:
                self.assertIn("FAILED (failures=1)", text)
                self.assertIn("rank 1 of 2 failed", text)
            self.assertRegex(texts[0], r"\n  rank 1 +failed ")
            self.assertNotRegex(texts[1], r"\n  rank 1 +failed ")


# As a shell has them in a container of a training job. Another process that runs these tests has another port.
LEFT = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
DO_NOT_WAIT = "from torch_testing_ext.launch.launched import peers\npeers.LONGEST_WAIT_FOR_PEER = 0\n"
SCRIPT = """
from torch_testing_ext.common_distributed import DistributedTestBase
from torch_testing_ext.common_utils import run_tests
class T(DistributedTestBase):
    world_size = 2
    def test_passes(self): ...
class OtherSizeTest(DistributedTestBase):
    world_size = 3
    def test_passes(self): ...
if __name__ == "__main__":
    run_tests()
"""


class LeftVariablesTest(PytestCase):
    """The variables of a rank, of which no other rank is there: somebody else has left them."""

    def told(self, rank: int) -> str:
        return f"RANK={rank} and WORLD_SIZE=2 are set as in a rank, but no other rank of that launch is running."

    def test_pytest(self) -> None:
        source = """
import pytest
from torch_testing_ext.launch import this_launch
@pytest.mark.world_size(2)
def test_marked(): ...
def test_others_do_not_see_it():
    sign = this_launch().sign_of(this_launch().rank)
    assert sign[1:] not in open("/proc/net/unix").read()
"""
        for rank in range(2):
            with self.subTest(rank=rank):
                run = run_pytest({"conftest.py": DO_NOT_WAIT, "test_x.py": source}, RANK=str(rank), **LEFT)
                self.assertOutcomes(run, {"test_marked": "failed", "test_others_do_not_see_it": "passed"})
                self.assertEqual(run.code, 1)
                self.assertIn(self.told(rank), run.messages["test_marked"])
                self.assertIn("run: env -u RANK -u WORLD_SIZE ", run.messages["test_marked"])

    def test_workers_of_xdist(self) -> None:
        """They do not wait once more, and name the user's command. A launcher that a test starts is heard."""
        source = """
import os
import pytest
from torch_testing_ext.launch.launched import peers
@pytest.mark.world_size(2)
def test_marked(): ...
def test_starts_programs():
    assert peers.NO_RANK not in os.environ
"""
        run = run_pytest({"conftest.py": DO_NOT_WAIT, "test_x.py": source}, "-n1", RANK="0", **LEFT)
        self.assertOutcomes(run, {"test_marked": "failed", "test_starts_programs": "passed"})
        self.assertIn(self.told(0), run.messages["test_marked"])
        self.assertRegex(run.messages["test_marked"], "run: env -u RANK -u WORLD_SIZE .* -n1")

    def test_the_runner(self) -> None:
        """It is never a rank, and its tests have ranks of their own."""
        mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        marked = "import pytest\n@pytest.mark.world_size(2)\ndef test_marked(dist_env): ...\n"
        with tempfile.TemporaryDirectory() as folder:
            tests = Path(folder, "test", "distributed")
            tests.mkdir(parents=True)
            Path(folder, "run_test.py").write_text(RUN_TEST.format(before=""))
            Path(tests, "test_x.py").write_text(SCRIPT)
            Path(tests, "test_y.py").write_text(marked)
            for name, left in {"torchrun": {"RANK": "1", **LEFT}, "mpirun": mpirun}.items():
                with self.subTest(name):
                    run = run_test(Path(folder), **left)
                    self.assertEqual((run.code, run.complaints), (0, ""))
                    self.assertEqual(run.console.splitlines()[-1], "3 passed, 0 failed, 0 skipped")

    def test_a_script(self) -> None:
        """Also the test of another world size fails: it is no rank that has nothing to do."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_x.py").write_text(DO_NOT_WAIT + SCRIPT)
            for rank in range(2):
                with self.subTest(rank=rank):
                    run = run_warm("test_x.py", cwd=folder, env=clean_environ(RANK=str(rank), **LEFT))
                    self.assertEqual(run.returncode, 1, run.stderr)
                    self.assertIn("FAILED (errors=2)", run.stderr)
                    self.assertEqual(run.stderr.count(self.told(rank)), 2, run.stderr)


if __name__ == "__main__":
    run_tests()
