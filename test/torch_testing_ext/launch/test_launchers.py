"""What the variables of launchers say of a process."""

import unittest

from torch_testing_ext.common_utils import run_tests
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


if __name__ == "__main__":
    run_tests()
