"""What the variables of launchers say of a process."""

import os
import socket
import subprocess
import unittest
from unittest import mock

from torch_testing_ext._machine.machine_resources import leased_port
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import environment
from torch_testing_ext.launch.environment import Launched

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1"}


class LaunchedTest(unittest.TestCase):
    def read(self, environ):
        found = Launched.read(environ)
        return None if found is None else (found.rank, found.world_size, found.is_one_machine)

    def test_launchers(self):
        self.assertEqual(self.read(TORCHRUN), (1, 4, True))
        self.assertEqual(self.read(MPIRUN), (0, 2, True))
        self.assertEqual(self.read(HYDRA), (1, 2, True))
        self.assertEqual(self.read(SRUN), (2, 3, True))

    def test_several_machines(self):
        self.assertEqual(self.read({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}), (1, 4, False))
        self.assertEqual(self.read({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}), (0, 2, False))
        self.assertEqual(self.read({**SRUN, "SLURM_STEP_NUM_NODES": "3"}), (2, 3, False))

    def test_no_launcher(self):
        batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
        alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
        self.assertIsNone(self.read(alone))
        self.assertIsNone(self.read({"RANK": "0", "WORLD_SIZE": "1"}))
        for environ in ({}, {"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, batch_script):
            with self.subTest(environ=environ):
                self.assertIsNone(self.read(environ))
        self.assertIsNone(self.read({"RANK": "x", "WORLD_SIZE": "2"}))

    def test_the_key_is_that_of_the_launch(self):
        def key(**more):
            found = Launched.read({**TORCHRUN, **more})
            assert found is not None
            return found.key

        self.assertEqual(key(), key(RANK="0"))
        self.assertNotEqual(key(), key(MASTER_PORT="2"))
        self.assertNotEqual(key(), key(TORCHELASTIC_RESTART_COUNT="1"))


class PeersTest(unittest.TestCase):
    """A process is a rank only if another one is there."""

    def setUp(self):
        # A port that no other launch has.
        lease = leased_port()
        self.variables = {**TORCHRUN, "MASTER_PORT": str(lease.__enter__())}
        self.addCleanup(lease.__exit__, None, None, None)

    def launched(self, **more):
        launched = Launched.read({**self.variables, **more})
        assert launched is not None
        return launched

    def start(self, **more):
        """Start a process with such variables, which runs until the test ends."""
        process = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, **self.variables, **more}
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.stdin.close)

    def test_alone(self):
        self.assertFalse(self.launched().sees_peer())

    def test_a_process_of_another_rank(self):
        self.start(RANK="1")
        self.assertFalse(self.launched().sees_peer())
        self.start(RANK="0", WORLD_SIZE="5")
        self.start(RANK="0", MASTER_PORT="2")
        self.assertFalse(self.launched().sees_peer())
        self.start(RANK="0")
        self.assertTrue(self.launched().sees_peer())

    def test_a_rank_that_has_set_its_variables_itself(self):
        self.launched(RANK="1").announce()
        self.addCleanup(lambda: environment._signs.pop().close())
        self.assertFalse(self.launched().sees_peer())
        self.assertTrue(self.launched(RANK="2").sees_peer())

    def test_the_coordinator(self):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.launched().address)
            self.assertTrue(self.launched().sees_peer())
            self.assertFalse(self.launched(RANK="0").sees_peer())

    def test_several_machines(self):
        """The other ranks need not be on this one. torchrun's store is there before them."""
        variables = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        self.assertTrue(self.launched(**variables).sees_peer())
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with mock.patch.dict(os.environ, {**self.variables, **variables}):
            self.assertFalse(self.launched(**variables).sees_peer())
            with socket.create_server(("127.0.0.1", int(self.variables["MASTER_PORT"]))):
                self.assertTrue(self.launched(**variables).sees_peer())


if __name__ == "__main__":
    run_tests()
