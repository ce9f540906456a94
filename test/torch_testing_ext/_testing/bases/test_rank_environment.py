"""The variables by which ranks find each other, and their devices. The check `devices-bound` of benchmarks/gpu/run
runs the same with a device for each rank."""

import json
import os
import socket
import subprocess
import sys
import unittest
from unittest import mock

import pytest
import torch.distributed as dist
from kit.ranks import OnCpu

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_RAS_ADDR")


def check_rank(test):
    """In a rank: all variables are set, and are right; a group can be made of them, and by another process."""
    own = {name: os.environ[name] for name in NAMES}
    test.assertEqual([str(test.rank)] * 2, [own["RANK"], own["LOCAL_RANK"]])
    test.assertEqual([str(test.world_size)] * 2, [own["WORLD_SIZE"], own["LOCAL_WORLD_SIZE"]])
    test.assertNotEqual(own["MASTER_PORT"], own["NCCL_RAS_ADDR"].rpartition(":")[2])


class TestEnvironment(MultiProcessTestCase):
    """Covered on a GPU by the check `devices-bound`."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_variables(self):
        """Covered on a GPU by the check `devices-bound`."""
        check_rank(self)
        dist.init_process_group("gloo")
        everyone = [None] * 2
        dist.all_gather_object(everyone, [os.environ[name] for name in NAMES[2:]])
        self.assertEqual(everyone[0], everyone[1])

    @pytest.mark.slow
    def test_a_process_that_a_rank_starts_is_not_taken_for_a_rank(self):
        """No GPU is involved."""
        code = "from torch_testing_ext._testing.bases import launched_ranks; print(launched_ranks.this_launch())"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual("None", run.stdout.strip(), run.stderr)

    @pytest.mark.slow
    def test_a_launcher_in_a_rank_is_seen(self):
        """No GPU is involved."""
        code = "from torch_testing_ext._testing.bases import launched_ranks; print(launched_ranks.this_launch().rank)"
        variables = {**os.environ, "RANK": str(self.rank), "WORLD_SIZE": "2", "MASTER_PORT": "1234"}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
        self.assertEqual(str(self.rank), run.stdout.strip(), run.stderr)


class TestChosenPort(MultiProcessTestCase):
    """Covered on a GPU by the check `devices-bound`."""

    world_size = 2

    def setUp(self):
        super().setUp()
        with socket.create_server(("localhost", 0)) as taken:
            self.port = str(taken.getsockname()[1])
        patch = mock.patch.dict(os.environ, MASTER_PORT=self.port)
        patch.start()
        self.addCleanup(patch.stop)
        with open(f"{self.file_name}.port", "w") as file:
            json.dump(self.port, file)
        self._spawn_processes()

    def test_a_port_that_the_test_has_chosen(self):
        """No GPU is involved."""
        with open(f"{self.file_name}.port") as file:
            self.assertEqual(json.load(file), os.environ["MASTER_PORT"])


class TestPersistent(OnCpu):
    """Covered on a GPU by the check `devices-bound`."""

    def test_variables(self):
        """Covered on a GPU by the check `devices-bound`."""
        check_rank(self)


class TestParent(unittest.TestCase):
    def test_the_parent_has_none_of_them(self):
        """No GPU is involved."""
        self.assertNotIn("_TORCH_TESTING_EXT_RANK", os.environ)


if __name__ == "__main__":
    run_tests()
