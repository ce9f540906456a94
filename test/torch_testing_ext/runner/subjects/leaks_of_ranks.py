import subprocess
import sys
import unittest

import pytest

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase
from torch_testing_ext.ranks import spawn

LEFT = ["sleep", "1000"]


def leave(rank=1):
    if rank == 1:
        subprocess.Popen(LEFT)


def leave_in_a_session_of_its_own(rank=0):
    subprocess.Popen(LEFT, start_new_session=True)


class FreshTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_leaves(self):
        leave(self.rank)

    def test_leaves_a_session(self):
        leave_in_a_session_of_its_own()

    def test_helper_that_ends_with_its_rank(self):
        subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    def test_fails_and_leaves(self):
        leave(self.rank)
        self.fail("on purpose")


class LastingTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_1_leaves(self):
        leave(self.rank)

    def test_2_passes(self):
        pass


class FunctionTest(unittest.TestCase):
    def test_leaves(self):
        spawn(leave_in_a_session_of_its_own, world_size=2)


@pytest.mark.world_size(2)
def test_marked(dist_env):
    leave(dist_env.rank)


@pytest.mark.standalone
@pytest.mark.world_size(2)
def test_alone(dist_env):
    leave(dist_env.rank)
