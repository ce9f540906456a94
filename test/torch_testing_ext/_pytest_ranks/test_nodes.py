"""Tests as if on several machines: what each node has of its own, and faults that one machine hides."""

import os
import tempfile
import unittest
from unittest import mock

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest
from kit.runs import RunsCase, run_test

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import launched_by
from torch_testing_ext.launch.aspects.nodes import NODES_OF_TEST
from torch_testing_ext.launch.attempts import Host, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.verdict import Case
from torch_testing_ext.runner.options import Options

SUBJECT = subject(__file__, "nodes_of_tests.py")
SOUND = ("test_place", "test_rendezvous", "test_memory_of_a_node", "Fresh.test_place", "Kept.test_place")
# By the name of a test: what is said of it.
FAULTS = {
    "leader_of_the_world": "ranks 2, 3 of 4 failed: AssertionError",
    "file_of_another_node": "ranks 2, 3 of 4 failed: AssertionError",
    "localhost": "node1: nobody listens at localhost",
    "shared_memory": "ranks 2, 3 of 4 raised FileNotFoundError",
    "local_group_of_global_ranks": "failed: AssertionError",
    "one_checkpoint_for_all_leaders": "raised FileExistsError",
    "local_world_size_as_world_size": "failed: AssertionError",
}
OF_DEVICES = {
    "device_of_the_rank": ": there are 2 fake accelerators",
    "devices_as_world_size": "failed: AssertionError",
}


@pytest.mark.slow
class NodesTest(PytestCase):
    def test_nodes_and_faults(self):
        run = run_pytest({"test_x.py": SUBJECT}, "-k", "not device")
        expected = dict.fromkeys((*SOUND, "Kept.test_attribute_of_its_own"), "passed")
        self.assertOutcomes(run, expected | {f"test_fault_{name}": "failed" for name in FAULTS})
        for name, said in FAULTS.items():
            self.assertIn(said, run.messages[f"test_fault_{name}"], name)

    def test_on_one_machine_the_faults_pass(self):
        source = SUBJECT.replace("nodes=2", "nodes=1").replace("nodes = 2", "nodes = 1")
        # The faults leave files where nodes of their own would have folders of their own.
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TMPDIR=folder):
            run = run_pytest({"test_x.py": source}, "-k", "leader_of or localhost or shared_memory or file_of")
        self.assertEqual({*run.outcomes.values()}, {"passed"}, run.text)

    def test_devices_of_a_node(self):
        run = run_pytest({"test_x.py": SUBJECT}, "-k", "device", "--fake-accelerators", "4")
        expected = {"test_devices": "passed"} | {f"test_fault_{name}": "failed" for name in OF_DEVICES}
        self.assertOutcomes(run, expected)
        for name, said in OF_DEVICES.items():
            self.assertIn(said, run.messages[f"test_fault_{name}"], name)


BAD = """
import pytest
from torch_testing_ext.common_distributed import MultiThreadedTestCase

@pytest.mark.world_size(3, nodes=2)
def test_uneven(ranks): ...

@pytest.mark.world_size(2, nodes=0)
def test_none(ranks): ...

class ThreadsTest(MultiThreadedTestCase):
    nodes = 2
    def setUp(self):
        super().setUp()
        self._spawn_threads()
    def test_threads(self): ...
"""
OF_RUN = """
import os
import pytest

@pytest.mark.world_size(2)
def test_on_two(dist_env):
    assert dist_env.node == dist_env.rank and os.environ["LOCAL_WORLD_SIZE"] == "1"

@pytest.mark.world_size(3)
def test_on_one(dist_env):
    assert dist_env.node == 0 and dist_env.local_rank == dist_env.rank
"""


class OptionTest(PytestCase):
    def test_bad_input(self):
        run = run_pytest({"test_x.py": BAD})
        self.assertIn("nodes is 2; 3 ranks cannot be shared out evenly among 2 nodes", run.text)
        self.assertIn("nodes is 0; it must be a number of nodes, 1 or more", run.text)
        self.assertIn("the test has 2 nodes: threads share the variables and folders", run.text)
        self.assertNotIn("passed", run.outcomes.values())

    def test_of_a_run(self):
        run = run_pytest({"test_x.py": OF_RUN}, "--nodes", "2")
        self.assertOutcomes(run, {"test_on_two": "passed", "test_on_one": "passed"})

    @pytest.mark.slow
    def test_whole_worlds_have_nodes(self):
        run = run_pytest({"test_x.py": OF_RUN}, "--nodes", "4", "--simulate", "8", "-k", "on_two")
        self.assertIn("assert (0 == 0 and '2' == '1'", run.text)


class Launched(Host):
    kind = HostKind.LAUNCHED

    def refusal(self, what, why):
        return RuntimeError(f"{what}: {why}")


class LauncherTest(unittest.TestCase):
    """A launcher has placed its ranks already."""

    def test_a_run(self):
        with mock.patch.object(launched_by, "this_launch", return_value=object()):
            NODES_OF_TEST.require(Options())
            with self.assertRaisesRegex(ValueError, "^--nodes: a launcher has placed the ranks of this run: run it"):
                NODES_OF_TEST.require(Options(nodes=2))

    def test_a_test(self):
        with self.assertRaisesRegex(RuntimeError, "^the test has 2 nodes: the launcher has placed the ranks$"):
            NODES_OF_TEST.check(Launched(), TestPlan(Case("test_x"), 4, nodes=2))

    def test_more_nodes_than_addresses(self):
        with self.assertRaisesRegex(ValueError, "^--nodes 201: a machine can pretend to be 200 nodes at most$"):
            NODES_OF_TEST.require(Options(nodes=201))


@pytest.mark.slow
class RunnerTest(RunsCase):
    def test_of_a_run(self):
        self.write("test/test_x.py", OF_RUN)
        run = run_test(self.root, "--nodes", "2")
        self.assertEqual(run.code, 0, run.console)


if __name__ == "__main__":
    run_tests()
